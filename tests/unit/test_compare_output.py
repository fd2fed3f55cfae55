"""Arguments, conditions, tables and folder of a comparison."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from comparisons import launch

from dualdist.bench.compare.metrics import summarize
from dualdist.bench.compare.output import tables, write_folder
from dualdist.bench.compare.runner import Comparison, Contender, RefusedContender, UserScript, format_duration
from dualdist.bench.jobs import DUALDIST, RunConfig
from dualdist.bench.report import error_summary, make_record
from dualdist.cli import compare
from dualdist.cli.compare import describe_settings, make_settings, make_work, parse_budget
from dualdist.errors import UsageError

CONTENDER = Contender(DUALDIST, RunConfig("native", "shm", "torchrun"))


@pytest.mark.parametrize(("text", "expected"), [("120s", 120), ("2m", 120), ("1.5h", 5400), ("90", 90)])
def test_a_budget_is_parsed_with_its_unit_and_durations_are_formatted(text: str, expected: float) -> None:
    assert parse_budget(text) == expected
    for wrong in ("", "s", "-3s", "0", "inf", "nan", "2 days"):
        with pytest.raises(UsageError, match="expected a time above 0"):
            parse_budget(wrong)
    shown = [format_duration(value) for value in (45, 89, 300, 12000)]
    assert shown == ["45 s", "89 s", "5 min", "3 h 20 min"]


def test_tables_have_what_was_launched() -> None:
    speed, cost = tables(
        summarize([CONTENDER], [], [launch(CONTENDER.key, number, 0.1 + number) for number in range(3)], "complete")
    )
    assert "95% of samples/s" in speed.columns
    assert "range of values" in speed.notes[0]
    assert "steps/s" not in speed.columns
    assert "efficiency" not in cost.notes[0]
    assert "TCP MiB/step" in cost.columns
    assert not {"GPU MiB", "8 B us", "efficiency"} & set(cost.columns)
    once, _ = tables(summarize([CONTENDER], [], [launch(CONTENDER.key, 0, 0.1)], "complete"))
    assert "95%" not in f"{once.columns}{once.notes}"
    assert all(len(row) == len(table.columns) for table in (speed, cost) for row in table.rows)


def test_the_page_leads_with_the_verdict_and_says_in_words_what_its_plots_show(tmp_path: Path) -> None:
    gloo = replace(CONTENDER, config=RunConfig("native", "gloo", "torchrun"))
    timed = {"sizes": [{"bytes": n, "seconds": {"dualdist_": [4e-5], "raw_": [2e-4]}} for n in (8, 1 << 20)]}
    done = [
        launch(each.key, number, step_s, label=each.label, allreduce=timed)
        for number in range(6)
        for each, step_s in ((gloo, 0.2), (CONTENDER, 0.1))
    ]
    refused = [
        RefusedContender(Contender(DUALDIST, RunConfig(name, "nccl", "torchrun")), "a<b; --budget 9m") for name in "ab"
    ]
    result = summarize([gloo, CONTENDER], refused, done, "complete")
    record = make_record("compare", "dualdist compare", {"ranks": 2, "model": "mlp"}, [], {})
    page = write_folder(tmp_path, result, record, done).read_text()
    assert re.search("<h1>(.*)</h1>", page)[1] == "native over shm (torchrun) is 2.00x faster"
    assert re.findall('<img alt="(.*?)"', page) == [
        "Step times: native over shm (torchrun) 100.00 ms, native over gloo (torchrun) 200.00 ms",
        "Allreduce of 8 B and 1 MiB: native over shm (torchrun) 40 us (raw library 200) and 26 GB/s (raw 5.2); "
        "native over gloo (torchrun) 40 us (raw library 200) and 26 GB/s (raw 5.2)",
        "Loss of 7 steps, from 3 to 1.5; the same to the last bit in all 2 contenders",
    ]
    reason = 'a&lt;b; <span class="option">--budget</span> 9m'  # no line ends after a hyphen of the option
    assert f"<td>a over nccl (torchrun), b over nccl (torchrun)</td><td>{reason}</td>" in page
    assert not re.findall(r"<td>([\d.]+) to \1</td>", page)
    assert page.count("prefers-color-scheme: dark") == 1
    for name in ("steps", "allreduce", "losses"):
        assert "prefers-color-scheme: dark" in (tmp_path / f"{name}.svg").read_text()
    first, *_ = tables(result)
    assert [row[0] for row in first.rows] == [CONTENDER.label, gloo.label]  # fastest first, as the ratio says


@pytest.mark.parametrize("is_script", [False, True])
def test_an_ordered_launch_is_short_and_differs_in_the_order_of_sums_only(is_script: bool) -> None:
    args = parsed("--model", "mlp", "-np", "3", "--env", "DUALDIST_REDUCTION=unordered", "--device", "cpu")
    work = UserScript(("train.py",), 3, 30) if is_script else make_work(args)
    comparison = Comparison(work, make_settings(args, args.ranks, 1), Path("/x"))
    plain, ordered = (comparison.plan_job(replace(CONTENDER, is_ordered=each), 0).command for each in (False, True))
    differing = {name for name in ordered.env if ordered.env[name] != plain.env[name]}
    assert ordered.env["DUALDIST_REDUCTION"] == "ordered"
    if is_script:
        assert differing == {"DUALDIST_REDUCTION", "DUALDIST_RECORD", "DUALDIST_RECORD_STEPS"}
        assert ordered.env["DUALDIST_RECORD_STEPS"] == "5"
        assert ordered.argv == plain.argv
        return
    assert differing == {"DUALDIST_REDUCTION"}
    asked, usual = (json.loads(each.argv[-1]) for each in (ordered, plain))
    assert {name: asked[name] for name in asked if asked[name] != usual[name]} == {"steps": 5, "sizes": []}


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("step failed: env torchrun\nTraceback\n  File\nRuntimeError: no memory\n[end]", "RuntimeError: no memory"),
        ("[rank1]: Traceback\n[rank1]: ValueError: boom\ndualdist.errors.RankLostError: rank 1\nTraceback\n"
         "torch.elastic.errors.ChildFailedError:\n====\n", "ValueError: boom"),
        ("mpi4py is not installed", "mpi4py is not installed"),
        ("", ""),
    ],
)  # fmt: skip
def test_an_output_is_told_by_the_line_of_its_error(text: str, summary: str) -> None:
    assert error_summary(text) == summary


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.configure(parser)
    args = parser.parse_args(words)
    compare.place_ranks(args)
    return args


@pytest.mark.parametrize(
    ("own", "words", "threads"),
    [("", (), 4), ("3", (), 3), ("3,2", (), 3), ("nonsense", (), 4), ("3", ("--threads", "2"), 2)],
)
def test_ranks_have_as_many_threads_as_with_dualdist_run(
    monkeypatch: pytest.MonkeyPatch, own: str, words: tuple[str, ...], threads: int
) -> None:
    monkeypatch.setattr("dualdist.cli.compare.usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", own)
    args = parsed(*words)
    assert describe_settings(args)["threads"] == threads


def test_settings_hide_secrets(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    settings = describe_settings(
        parsed("--env", "A_TOKEN=hush-1", "--env", "A=b", "--script", f"{tmp_path}/train.py", "--", "KEY=hush-2")
    )
    assert (settings["env"], settings["arguments"]) == (["A_TOKEN=***", "A=b"], ["KEY=***"])
    assert "hush" not in json.dumps(settings)

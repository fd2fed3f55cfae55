"""Arguments, conditions, tables, CSV and folder of a comparison."""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from comparisons import launch

from dualdist.bench.compare.launches import CONDITIONS, Launch, check_folder, claim_folder, read_launch
from dualdist.bench.compare.metrics import summarize
from dualdist.bench.compare.output import tables, write_csv
from dualdist.bench.compare.runner import Contender, format_duration
from dualdist.bench.jobs import DUALDIST, RunConfig
from dualdist.bench.report import error_summary, write_atomically
from dualdist.cli import compare
from dualdist.cli.compare import describe_conditions, describe_settings, make_settings, parse_budget
from dualdist.errors import UsageError
from dualdist.launch.job import Site

SITE = Site("/v/python", {}, "/v")
CONTENDER = Contender(DUALDIST, RunConfig("native", "shm", "torchrun"))


@pytest.mark.parametrize(("text", "expected"), [("120s", 120), ("2m", 120), ("1.5h", 5400), ("90", 90)])
def test_a_budget_is_parsed_with_its_unit_and_durations_are_formatted(text: str, expected: float) -> None:
    assert parse_budget(text) == expected
    for wrong in ("", "s", "-3s", "0", "inf", "nan", "2 days"):
        with pytest.raises(UsageError, match="expected a time above 0"):
            parse_budget(wrong)
    shown = [format_duration(value) for value in (45, 89, 300, 12000)]
    assert shown == ["45 s", "89 s", "5 min", "3 h 20 min"]


def test_tables_and_csv_have_what_was_launched(tmp_path: Path) -> None:
    speed, cost = tables(
        summarize([CONTENDER], [], [launch(CONTENDER.key, number, 0.1) for number in range(3)], "complete")
    )
    assert "samples/s" in speed.columns
    assert "range of values" in speed.notes[0]
    assert "TCP MiB/step" in cost.columns
    assert not {"GPU MiB", "8 B us", "efficiency"} & set(cost.columns)
    assert all(len(row) == len(table.columns) for table in (speed, cost) for row in table.rows)


def test_csv_includes_failed_launches_with_the_error_of_their_output(tmp_path: Path) -> None:
    failed = Launch(
        contender="x", label="x", round=1, began=0, seconds=1, command="c", error="exit code 1\nOSError: gone"
    )
    write_csv(tmp_path / "a.csv", [launch(CONTENDER.key, 0, 0.1), failed])
    with (tmp_path / "a.csv").open() as file:
        good, bad = csv.DictReader(file)
    assert (good["label"], float(good["step_s"]), good["error"]) == (CONTENDER.key, pytest.approx(0.1), "")
    assert (bad["contender"], bad["round"], bad["step_s"], bad["error"]) == ("x", "1", "", "OSError: gone")
    assert (
        error_summary("step failed: env torchrun\nTraceback\n  File\nRuntimeError: no memory\n[end]")
        == "RuntimeError: no memory"
    )
    text = "[rank1]: Traceback\n[rank1]: ValueError: boom\ndualdist.errors.RankLostError: rank 1\nTraceback\n"
    assert error_summary(f"{text}torch.elastic.errors.ChildFailedError:\n====\n") == "ValueError: boom"
    assert error_summary("mpi4py is not installed") == "mpi4py is not installed"
    assert error_summary("") == ""


def test_a_launch_round_trips_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "launches" / "one.json"
    write_atomically(path, launch(CONTENDER.key, 0, 0.1).model_dump_json())
    assert read_launch(path) == launch(CONTENDER.key, 0, 0.1)
    lost = launch(CONTENDER.key, 0, 0.1, losses=[math.nan, math.inf, -math.inf, None], sample=[math.nan])
    write_atomically(path, lost.model_dump_json())
    assert str(read_launch(path)) == str(lost)
    path.write_text("{}")
    with pytest.raises(UsageError, match=r"one\.json: not a launch of dualdist compare; delete it"):
        read_launch(path)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.configure(parser)
    return parser.parse_args(words)


def conditions(*words: str) -> dict[str, Any]:
    return describe_conditions(parsed(*words))


def test_conditions_identify_the_work_common_to_all_launches(tmp_path: Path) -> None:
    assert conditions("--self-check", "5") == conditions("--self-check", "5", "--rounds", "3", "--budget", "1h")
    assert conditions("--self-check", "5") != conditions("--self-check", "50")
    assert set(conditions()["versions"]) >= {"dualdist", "torch"}
    assert (conditions("--model", "mlp")["batch"], conditions("--model", "mlp")["steps"]) == (64, 100)
    assert conditions("--model", "mlp") == conditions("--model", "mlp", "--batch", "64")
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    words = ("--script", str(script))
    for path in (script, other):
        path.write_text("before")
    before = conditions(*words)
    assert before["script"] == str(script)
    assert before == conditions("--script", f"{tmp_path}/../{tmp_path.name}/train.py")
    assert before != conditions("--script", str(other))
    script.write_text("after")
    assert before != conditions(*words)
    script.unlink()
    with pytest.raises(UsageError, match=r"train\.py: cannot be read \(No such file or directory\)"):
        conditions(*words)


def test_conditions_hold_gpus_and_inherited_communication_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = conditions()
    assert before["machine"].keys() >= {"gpus", "driver"}
    communication = ("GLOO_SOCKET_IFNAME", "NCCL_ALGO", "HOROVOD_CYCLE_TIME", "OMPI_MCA_btl", "UCX_TLS")
    for name in (*communication, "CUDA_VISIBLE_DEVICES"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "changed")
            assert f"{name}=changed" in conditions()["inherited"]
    # Each launch sets its own, or none reads it.
    for name in ("OMP_NUM_THREADS", "DUALDIST_BACKEND", "DUALDIST_JOB", "EDITOR"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "changed")
            assert conditions("--threads", "1") == before
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "hush-1")
    kept = conditions()
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "hush-2")
    assert kept != conditions()
    assert "hush" not in json.dumps([kept, conditions()])


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
    assert (make_settings(args, SITE).threads, describe_settings(args)["threads"]) == (threads, threads)


def test_conditions_and_settings_hide_secrets_and_conditions_detect_changes(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()

    def words(secret: str, key: str = "hush-3") -> tuple[str, ...]:
        return ("--env", f"A_TOKEN={secret}", "--env", "A=b", "--script", f"{tmp_path}/train.py", "--", f"KEY={key}")

    before = conditions(*words("hush-1"))
    assert before["env"][1] == "A=b"
    assert before == conditions(*words("hush-1"))
    assert before != conditions(*words("hush-2"))
    assert before != conditions(*words("hush-1", "hush-4"))
    settings = describe_settings(parsed(*words("hush-1")))
    assert (settings["env"], settings["arguments"]) == (["A_TOKEN=***", "A=b"], ["KEY=***"])
    assert "hush" not in json.dumps([before, settings])


def claim(folder: Path, conditions: dict[str, Any]) -> None:
    with claim_folder(folder, conditions):
        assert json.loads((folder / CONDITIONS).read_text()) == conditions


def test_a_folder_holds_one_comparison_of_one_process(tmp_path: Path) -> None:
    claim(tmp_path / "new", {"seed": 0, "model": "mlp"})
    claim(tmp_path / "new", {"seed": 0, "model": "mlp"})
    check_folder(tmp_path / "new", {"seed": 0, "model": "mlp"})
    check_folder(tmp_path / "none", {})
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="model was 'mlp' and is 'resnet18'"):
        check_folder(tmp_path / "new", {"seed": 0, "model": "resnet18"})
    assert [path.name for path in (tmp_path / "new").iterdir()] == [CONDITIONS]
    with pytest.raises(UsageError, match="model was 'mlp' and is 'resnet18'"):
        claim(tmp_path / "new", {"seed": 0, "model": "resnet18"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(UsageError, match="expected a new or empty folder"):
        claim(tmp_path / "other", {})
    (tmp_path / "new" / CONDITIONS).write_text("[]")
    with pytest.raises(UsageError, match="cannot be used"):
        claim(tmp_path / "new", {})
    (tmp_path / "broken off").mkdir()
    (tmp_path / "broken off" / "conditions.json.draft").write_text('{"se')
    with claim_folder(tmp_path / "broken off", {"seed": 0}):
        with pytest.raises(UsageError, match="another dualdist compare uses it"):
            claim(tmp_path / "broken off", {"seed": 0})
        assert json.loads((tmp_path / "broken off" / CONDITIONS).read_text()) == {"seed": 0}
    claim(tmp_path / "broken off", {"seed": 0})

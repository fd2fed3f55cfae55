"""What a comparison prints and writes: times, reasons, tables without empty columns, CSV that keeps failures."""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from comparisons import launch

from dualdist.bench.compare.figures import result
from dualdist.bench.compare.launches import Launch, read, write
from dualdist.bench.compare.matrix import DUALDIST, Cell
from dualdist.bench.compare.runner import CONDITIONS, claimed, looked_at
from dualdist.bench.compare.schedule import duration
from dualdist.bench.compare.tables import tables, write_csv
from dualdist.bench.jobs import RunConfig
from dualdist.bench.report import last_words
from dualdist.cli import compare
from dualdist.cli.compare_request import conditions_of, seconds, setting_of, settings_of
from dualdist.errors import UsageError

CELL = Cell(DUALDIST, RunConfig("native", "shm", "torchrun"))


@pytest.mark.parametrize(("text", "expected"), [("120s", 120), ("2m", 120), ("1.5h", 5400), ("90", 90)])
def test_a_budget_is_a_time_with_a_unit(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "s", "-3s", "0", "inf", "nan", "2 days"])
def test_a_budget_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a time above 0"):
        seconds(text)


@pytest.mark.parametrize(("value", "words"), [(45, "45 s"), (89, "89 s"), (300, "5 min"), (12000, "3 h 20 min")])
def test_what_is_left_is_told_as_people_do(value: float, words: str) -> None:
    assert duration(value) == words


def test_of_a_long_output_the_error_is_told() -> None:
    assert (
        last_words("step failed: env torchrun\nTraceback\n  File\nRuntimeError: no memory\n[end]")
        == "RuntimeError: no memory"
    )
    told = "[rank1]: Traceback\n[rank1]: ValueError: boom\ndualdist.errors.RankLostError: rank 1\nTraceback\n"
    assert last_words(f"{told}torch.elastic.errors.ChildFailedError:\n====\n") == "ValueError: boom"
    assert last_words("mpi4py is not installed") == "mpi4py is not installed"
    assert last_words("") == ""


def test_tables_leave_out_what_is_known_of_no_contender() -> None:
    speed, cost = tables(result([CELL], [], [launch(CELL.key, number, 0.1) for number in range(3)], "complete"))
    assert "samples/s" in speed.columns
    assert "range of what was seen" in speed.notes[0]
    assert "TCP MiB/step" in cost.columns
    assert not {"GPU MiB", "8 B us", "efficiency"} & set(cost.columns)
    assert all(len(row) == len(table.columns) for table in (speed, cost) for row in table.rows)


def test_csv_keeps_what_failed(tmp_path: Path) -> None:
    failed = Launch(cell="x", round=1, began=0, seconds=1, command="c", error="exit code 1\nOSError: gone")
    write_csv(tmp_path / "a.csv", [launch(CELL.key, 0, 0.1), failed], {CELL.key: CELL.label})
    with (tmp_path / "a.csv").open() as file:
        good, bad = csv.DictReader(file)
    assert (good["label"], float(good["step_s"]), good["error"]) == (CELL.label, pytest.approx(0.1), "")
    assert (bad["cell"], bad["round"], bad["step_s"], bad["error"]) == ("x", "1", "", "OSError: gone")


def test_a_launch_survives_its_file_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "launches" / "one.json"
    write(launch(CELL.key, 0, 0.1), path)
    assert read(path) == launch(CELL.key, 0, 0.1)
    lost = launch(CELL.key, 0, 0.1, losses=[math.nan, math.inf, -math.inf, None], sample=[math.nan])
    write(lost, path)
    assert str(read(path)) == str(lost)
    path.write_text("{}")
    with pytest.raises(UsageError, match=r"one\.json: this is no launch of dualdist compare; delete it"):
        read(path)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.configure(parser)
    return parser.parse_args(words)


def conditions(*words: str) -> dict[str, Any]:
    return conditions_of(parsed(*words))


def test_conditions_are_the_work_that_launches_have_in_common(tmp_path: Path) -> None:
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


def test_conditions_hold_the_gpus_and_what_ranks_inherit_that_changes_communication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = conditions()
    assert before["machine"].keys() >= {"gpus", "driver"}
    for name in (
        "GLOO_SOCKET_IFNAME",
        "NCCL_ALGO",
        "HOROVOD_CYCLE_TIME",
        "OMPI_MCA_btl",
        "UCX_TLS",
        "CUDA_VISIBLE_DEVICES",
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, "changed")
            assert f"{name}=changed" in conditions()["inherited"]
    for name in (
        "OMP_NUM_THREADS",
        "DUALDIST_BACKEND",
        "DUALDIST_JOB",
        "EDITOR",
    ):  # each launch sets its own, or none reads it
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
def test_ranks_have_the_threads_that_dualdist_run_would_give_them(
    monkeypatch: pytest.MonkeyPatch, own: str, words: tuple[str, ...], threads: int
) -> None:
    monkeypatch.setattr("dualdist.cli.compare_request.usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", own)
    args = parsed(*words)
    assert (setting_of(args).threads, settings_of(args)["threads"]) == (threads, threads)


def test_conditions_and_settings_hold_no_secret_and_conditions_tell_two_apart(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()

    def words(secret: str, key: str = "hush-3") -> tuple[str, ...]:
        return ("--env", f"A_TOKEN={secret}", "--env", "A=b", "--script", f"{tmp_path}/train.py", "--", f"KEY={key}")

    before = conditions(*words("hush-1"))
    assert before["env"][1] == "A=b"
    assert before == conditions(*words("hush-1"))
    assert before != conditions(*words("hush-2"))
    assert before != conditions(*words("hush-1", "hush-4"))
    settings = settings_of(parsed(*words("hush-1")))
    assert (settings["env"], settings["arguments"]) == (["A_TOKEN=***", "A=b"], ["KEY=***"])
    assert "hush" not in json.dumps([before, settings])


def claim(folder: Path, conditions: dict[str, Any]) -> None:
    with claimed(folder, conditions):
        assert json.loads((folder / CONDITIONS).read_text()) == conditions


def test_a_folder_belongs_to_one_comparison(tmp_path: Path) -> None:
    claim(tmp_path / "new", {"seed": 0, "model": "mlp"})
    claim(tmp_path / "new", {"seed": 0, "model": "mlp"})
    looked_at(tmp_path / "new", {"seed": 0, "model": "mlp"})
    looked_at(tmp_path / "none", {})
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="model was 'mlp' and is 'resnet18'"):
        looked_at(tmp_path / "new", {"seed": 0, "model": "resnet18"})
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


def test_two_comparisons_are_never_at_work_in_one_folder(tmp_path: Path) -> None:
    with claimed(tmp_path, {"seed": 0}):
        with pytest.raises(UsageError, match="another dualdist compare is at work there"):
            claim(tmp_path, {"seed": 0})
        assert json.loads((tmp_path / CONDITIONS).read_text()) == {"seed": 0}
    claim(tmp_path, {"seed": 0})


def test_a_claim_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "conditions.draft").write_text('{"se')
    claim(tmp_path, {"seed": 0})

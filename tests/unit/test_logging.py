"""Printing, logs, progress, and tracebacks without frames of dualdist."""

import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import dualdist as dd
from dualdist.logging import _format_progress

LOGS = """
import logging, sys
import dualdist as dd
dd.setup_logging("INFO", others="ERROR")
log = logging.getLogger("train")
log.info("before")
log.error("wrong")
if dd.is_initialized() or sys.argv[1:] == ["init"]:
    dd.init()
    log.info("after")
"""


def python(env: Mapping[str, str], *argv: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *argv]
    return subprocess.run(command, env=dict(env), input=typed, capture_output=True, text=True, timeout=60, check=False)


def of_rank(rank: int) -> dict[str, str]:
    return {"DUALDIST_RANK": str(rank), "DUALDIST_SIZE": "3", "DUALDIST_RENDEZVOUS": "file:///nowhere/x"}


def test_logs_name_the_rank_once_and_other_ranks_are_quiet(base_env: Mapping[str, str]) -> None:
    """Before init() the rank is the launcher's, afterwards the session's."""
    first, last = (python({**base_env, **of_rank(rank)}, "-c", LOGS) for rank in (0, 2))
    assert [line.partition(" [")[2] for line in first.stderr.splitlines()] == [
        "0/3] INFO train: before",
        "0/3] ERROR train: wrong",
    ]
    assert [line.partition(" [")[2] for line in last.stderr.splitlines()] == ["2/3] ERROR train: wrong"]
    alone = python(base_env, "-c", LOGS, "init")
    assert "[0/1] INFO train: after" in alone.stderr
    program = "import logging, dualdist as dd; dd.setup_logging(); dd.setup_logging(); logging.info('once')"
    assert python(base_env, "-c", program).stderr.count("once") == 1
    wrong = python(base_env, "-c", "import dualdist as dd; dd.setup_logging('LOUD')")
    assert "level 'LOUD': expected one of Python's logging" in wrong.stderr


@pytest.mark.parametrize(("shown", "isatty"), [("", False), ("", True), ("tagged", False), ("terminal", False)])
def test_progress_is_a_bar_on_a_terminal_and_else_a_line_and_run_may_tag_what_is_printed(
    shown: str, isatty: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUALDIST_OUTPUT", shown)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: isatty)
    dd.init()
    dd.print("a\nb", rank=None)
    assert list(dd.progress(range(30), "epoch 1")) == list(range(30))
    dd.shutdown()
    out, err = capsys.readouterr()
    assert out == ("a\nb\n" if shown == "tagged" else "[0] a\n[0] b\n")
    head, bar = ("\r", " |####################|") if isatty or shown == "terminal" else ("", "")
    assert re.fullmatch(rf"{head}epoch 1: 100%{re.escape(bar)} 30/30 in 0:00, \S+/s\n", err)


def test_progress_is_shown_on_rank_0_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in of_rank(2).items():
        monkeypatch.setenv(name, value)
    assert list(dd.progress(range(30))) == list(range(30))
    assert capsys.readouterr().err == ""


class Uncounted:
    """Iterates, with a length that is an error, as a DataLoader of an iterable data set."""

    def __len__(self) -> int:
        raise TypeError

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_progress_without_a_length_or_a_stream_yields_the_items(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(dd.progress(Uncounted(), "epoch")) == [0, 1, 2]
    assert capsys.readouterr().err.startswith("epoch: 3 in 0:00")
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    assert list(dd.progress(range(3))) == [0, 1, 2]


def test_a_line_and_its_end_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI tags each piece that it reads, and under horovodrun a rank's standard output is unbuffered."""
    written: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", written.append)
    dd.init()
    dd.print("a", 1, file=stream)
    dd.shutdown()
    assert [text for text in written if text] == ["a 1\n"]


@pytest.mark.parametrize(
    ("total", "done", "passed", "expected"),
    [
        (100, 25, 50.0, " 25% 25/100 in 0:50, 2:30 left, 0.5/s"),
        (100, 100, 3700.0, "100% 100/100 in 1:01:40, 0.027/s"),
        (None, 30, 10.0, "30 in 0:10, 3/s"),
        (0, 0, 0.0, "100% 0/0 in 0:00, 0/s"),
    ],
)
def test_progress_shows_share_time_and_rate(total: int | None, done: int, passed: float, expected: str) -> None:
    assert _format_progress(done, total, passed, has_bar=False) == expected


def test_progress_is_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("time.monotonic", itertools.count().__next__)  # called once or twice for an item
    list(dd.progress(iter(range(290))))
    assert capsys.readouterr().err.count("\n") == 5


INITIALIZED = "import torch\nimport dualdist as dd\ndd.init()\ndef mine():\n    "
SPAWNED = "import dualdist as dd\ndef mine():\n    dd.init(), {}\nif __name__ == '__main__':\n    dd.spawn(mine, 1)\n"
FAILED_RANK = "LaunchError: rank 0 failed:\nTraceback"
FAILING = {
    "before init": ("import dualdist as dd\ndef mine():\n    dd.rank()\nmine()\n", "NotInitializedError: "),
    "in a call": (f"{INITIALIZED}dd.allreduce(torch.ones(1), op='nothing')\nmine()\n", "UsageError: "),
    "in torch": (f"{INITIALIZED}w.sum().backward()\nw = torch.nn.Parameter(torch.ones(2))\n"
     "o = dd.wrap_optimizer(torch.optim.SGD([w], lr=1.0), op='sum')\nmine()\nmine()\n", "UsageError: "),
    "in a rank": (SPAWNED.format("1 / 0"), FAILED_RANK),
    "of ours in a rank": (SPAWNED.format("dd.init()"), FAILED_RANK),
}  # fmt: skip


@pytest.mark.smoke("before init", "in a call", "in a rank")
@pytest.mark.parametrize("name", FAILING)
def test_an_error_shows_the_programs_frames_only(base_env: Mapping[str, str], tmp_path: Path, name: str) -> None:
    """Of a rank: in the process that started it, too."""
    program, words = FAILING[name]
    script = tmp_path / "script.py"
    script.write_text(program)
    shown = python(base_env, str(script)).stderr
    assert f"dualdist.errors.{words}" in shown
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.count(", in mine") == 1
    assert f"{os.sep}dualdist{os.sep}" not in shown, shown
    assert "DUALDIST_DEBUG=1" in shown
    if name == "before init":  # which takes no torch, and little time
        full = python({**base_env, "DUALDIST_DEBUG": "1"}, str(script)).stderr
        assert f"{os.sep}dualdist{os.sep}" in full
        assert shown.splitlines()[-1] == full.splitlines()[-1]


def test_ranks_of_spawn_that_would_spawn_ranks_are_one_sentence(base_env: Mapping[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import dualdist as dd\ndd.spawn(print, 2)\n")
    shown = python(base_env, str(script)).stderr
    assert shown.count("Error: ") == 1, shown
    assert "UsageError: the ranks of dd.spawn import script.py, which calls dd.spawn again: put that call" in shown


@pytest.mark.full
def test_other_errors_and_other_hooks_are_left_alone(base_env: Mapping[str, str]) -> None:
    plain = python(base_env, "-c", "import dualdist as dd; dd.init(); 1 / 0").stderr
    assert plain.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "DUALDIST_DEBUG" not in plain
    hooked = "import sys\nsys.excepthook = lambda *_: print('mine')\nimport dualdist as dd\ndd.init()\ndd.init()"
    assert python(base_env, "-c", hooked).stdout == "mine\n"


@pytest.mark.full
def test_ipython_shows_the_programs_frames_too(base_env: Mapping[str, str], tmp_path: Path) -> None:
    """As in a notebook: the cell's line and the error only."""
    cells = "import dualdist as dd\ndd.init()\ndd.init()\n1 / 0\ndd.run(lambda: {}['the key'], np=1)\n"
    output = {}
    for debug in ("0", "1"):
        env = {**base_env, "DUALDIST_DEBUG": debug, "IPYTHONDIR": str(tmp_path), "HOME": str(tmp_path)}
        options = ("--colors=NoColor", "--no-banner", "--no-confirm-exit", "--quick")
        done = python(env, "-m", "IPython", *options, typed=cells)
        output[debug] = done.stdout + done.stderr
    for text in output.values():
        assert "AlreadyInitializedError: dd.init() was called a second time" in text, text
        assert "ZeroDivisionError" in text
        assert "KeyError: 'the key'" in text
    assert "session.py" in output["1"]
    assert "session.py" not in output["0"], output["0"]
    assert "spawn.py" not in output["0"], output["0"]

"""Damaged files and arbitrary command lines are understood or refused by one of our errors, never by another one."""

import argparse
import contextlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.conftest import error_of
from harness.base_env import ROOT
from harness.effort import Effort
from hypothesis import strategies as st

from dualdist.checkpoint.files import EXTRA, FORMAT, METADATA, FileProgress, read_newest, write
from dualdist.cli import build_parser, main
from dualdist.errors import CheckpointError, RendezvousError, UsageError
from dualdist.horovod_build.record import BuildRecord, from_json
from dualdist.launch import hosts
from dualdist.launch.job_file import loads
from dualdist.launch.option import options_of
from dualdist.launch.run_request import RunRequest
from dualdist.launch.schedulers import SCHEDULERS
from dualdist.launch.script_request import Resources
from dualdist.utils import control_channel, saved_choices
from dualdist.utils.network_interfaces import StoreAddress
from dualdist.utils.saved_choices import ChoiceConditions, SavedChoice

JOBS = [path.read_text() for path in sorted((ROOT / "launch" / "jobs").glob("*.yaml"))]
KEYS = [*options_of(RunRequest), *options_of(Resources), "resources", "partition"]
PLAIN_WORDS = """1 0 -1 2 1e400 4.5 true null ~ '' a:2,b:2 64G torchrun mpirun native mpi horovod gloo 2:00:00 $(id)
{ [ *a &a | > %"""
OTHER_WORDS = ["9" * 30, "x y", "!!python/object/apply:os.system [id]", "!!binary aGk=", "<<: *a", "? [1]", "- - -"]
WORDS = st.one_of(
    st.sampled_from(PLAIN_WORDS.split()),
    st.sampled_from(OTHER_WORDS),
    st.text("abc:2,-/\\'\"{}[]#&*!|>%@`\t\n \0é\u2028\U0001f600", max_size=8),
    st.integers().map(str),
    st.floats().map(str),
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 10) | st.floats()
VALUES = st.recursive(
    SCALARS | st.sampled_from(["", "a", "2", "native", "x" * 300]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from(["a", "schema"]), inside, max_size=2),
    max_leaves=5,
)
DEEP = "[" * 100_000


@st.composite
def damaged(draw: st.DrawFn, texts: Sequence[str], words: st.SearchStrategy[str] = WORDS) -> str:
    """Draw a text of which pieces are missing, doubled or replaced."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 1, 2, 5, 20, 1000])))
        piece = draw(st.sampled_from(["", text[start:end] * 2]) | words)
        text = text[:start] + piece + text[end:]
    return text


@st.composite
def altered(draw: st.DrawFn, document: Any) -> str:
    """Draw JSON of which one value is replaced or missing, or which is damaged as a text."""
    top = {"": json.loads(json.dumps(document))}
    parent, key = top, ""
    while isinstance(parent[key], (dict, list)) and parent[key] and draw(st.booleans()):
        parent = parent[key]
        key = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
    if parent is not top and draw(st.booleans()):
        del parent[key]
    else:
        parent[key] = draw(VALUES)
    text = json.dumps(top[""])
    return draw(st.one_of(st.just(text), damaged([text]), st.sampled_from(["", DEEP, "\ufeff{}", "nan"])))


YAMLS = st.one_of(
    damaged(JOBS),
    st.lists(st.tuples(st.sampled_from(KEYS), WORDS), max_size=5).map(lambda lines: "\n".join(map(": ".join, lines))),
    st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=4).map(lambda pairs: json.dumps(dict(pairs))),
    st.text(max_size=20),
    st.sampled_from(
        [DEEP, "a: " * 5000, "&a [*a, *a]", "x: &a [1]\n" + "y: &b [*a,*a]\n", "\ufeffranks: 2", "--- 1\n--- 2"]
    ),
)


@pytest.mark.smoke
def test_a_job_file_is_a_job_or_errors_with_file_and_line(effort: Effort) -> None:
    def check(text: str) -> None:
        error = error_of(lambda: loads(text, "job.yaml"), UsageError)
        assert all(re.match(r"job\.yaml:[0-9]+: .", line) for line in error.splitlines()), error

    effort.fuzz("job files", YAMLS, check, 400)


def run_command(words: Sequence[str]) -> tuple[int, str, str]:
    """Return the exit code, output and error output of a command; any exception but SystemExit is raised."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue(), err.getvalue()


def assert_answered(words: Sequence[str]) -> None:
    code, out, err = run_command(words)
    assert code in (0, 1, 2)
    if code:
        assert err.startswith(f"dualdist {words[0]}: ") or "scripts ignore" in err or "error: " in err, err
    assert (code == 0) == bool(out)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, with no program on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_job_script_of_any_job_file_is_written_or_refused(nowhere: Path, effort: Effort) -> None:
    def check(given: tuple[str, str]) -> None:
        Path("job.yaml").write_text(given[0], errors="surrogatepass")
        assert_answered(["run", "--config", "job.yaml", "--scheduler", given[1], "--dry-run", "train.py"])

    effort.fuzz("job scripts", st.tuples(YAMLS, st.sampled_from(list(SCHEDULERS))), check, 60)


def options_of(command: str) -> list[str]:
    """Return all options of the command and its sub-commands."""

    def options(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            yield from (option for option in action.option_strings if option not in ("-h", "--help"))
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from options(parser)

    parsers = next(each for each in build_parser(command)._actions if isinstance(each, argparse._SubParsersAction))
    return list(options(parsers.choices[command]))


@pytest.mark.smoke
def test_any_command_line_is_answered(nowhere: Path, effort: Effort) -> None:
    Path("train.py").touch()
    without_nul = WORDS.map(lambda word: word.replace("\0", ""))  # which no command line can have
    words = st.lists(st.sampled_from([*options_of("run"), *SCHEDULERS, "--", "train.py"]) | without_nul, max_size=8)
    effort.fuzz(
        "command lines", words, lambda given: assert_answered(["run", "--scheduler", "slurm", "--dry-run", *given])
    )


@pytest.mark.parametrize("words", ["doctor", "compare --dry-run", "bench step --dry-run"])
def test_any_options_of_other_commands_are_answered(nowhere: Path, words: str, effort: Effort) -> None:
    Path("file").touch()
    options = [option for option in options_of(words.split()[0]) if option != "--save-choice"]
    some = st.sampled_from(
        ["file", "/", "/proc/nowhere/x", "1,2,4", "nan", "inf", "10m", "resnet18", "native:shm", "cpu"]
    )
    without_nul = st.text(max_size=3).map(lambda word: word.replace("\0", "")) | some
    given = st.lists(st.tuples(st.sampled_from(options), without_nul), max_size=4)

    def check(pairs: list[tuple[str, str]]) -> None:
        code, _, _ = run_command([*words.split(), *(word for pair in pairs for word in pair)])
        assert code in (0, 1, 2)

    for option in options:
        for value in ("file", "/proc/nowhere/x"):
            check([(option, value)])
    effort.fuzz(f"command lines of {words.split()[0]}", given, check, 20)


@pytest.mark.smoke
def test_a_host_file_is_hosts_or_an_error(tmp_path: Path, effort: Effort) -> None:
    lines = st.lists(damaged(["a slots=2", "b:3", "c", "# d", "e slots = 4 max-slots=8", "10.0.0.1:2"]), max_size=4)
    path = tmp_path / "hosts"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        error = error_of(lambda: hosts.read_hostfile(path), UsageError)
        assert str(path) in error if error else all(host.name and host.slots > 0 for host in hosts.read_hostfile(path))

    effort.fuzz("host files", st.binary(max_size=20) | lines.map(lambda drawn: "\n".join(drawn).encode()), check)
    effort.fuzz(
        "lists of hosts", damaged(["a:2,b:2"]), lambda text: error_of(lambda: hosts.parse_hosts(text), UsageError)
    )


SAVED = SavedChoice(
    ChoiceConditions("a", 2, "cpu", "torchrun", False, 2, 1, 2), "native", "shm", "2026-01-01", "1.3x faster"
)


@pytest.mark.smoke
def test_saved_choices_are_choices_or_an_error(tmp_path: Path, effort: Effort) -> None:
    path = tmp_path / "choices.json"

    def check(text: str) -> None:
        path.write_text(text, errors="surrogatepass")
        if not error_of(lambda: saved_choices.load_choices(path), UsageError):
            assert all(str(saved) for saved in saved_choices.load_choices(path))
        path.write_bytes(text.encode(errors="surrogatepass")[:-1] + b"\xff")
        error_of(lambda: saved_choices.load_choices(path), UsageError)

    effort.fuzz("files of saved choices", altered({"schema": saved_choices.SCHEMA, "choices": [asdict(SAVED)]}), check)


@pytest.mark.smoke
def test_other_files_in_a_folder_of_checkpoints_hide_no_valid_one(tmp_path: Path, effort: Effort) -> None:
    def save(step: int) -> Path:
        return write(tmp_path, {METADATA: {"format": FORMAT}, EXTRA: {"step": step}}, None, FileProgress())

    def step_found() -> int:
        found = read_newest(tmp_path, FileProgress())
        assert found is not None
        return int(found.content[EXTRA]["step"])

    good = save(1)
    names = st.sampled_from(["checkpoint-{}.pt", ".checkpoint-{}.x.draft", "checkpoint-{}.pt.tmp", "{}"])
    numbers = st.sampled_from(["00000002", "99999999", "9" * 200, "9" * 241, "2", "٠٠٠٠٠٠٠٩", "-0000001", "0000000a"])

    def check(given: list[tuple[str, str, bytes]]) -> None:
        for pattern, number, data in given:
            path = tmp_path / pattern.format(number)
            with contextlib.suppress(OSError):  # a name too long
                path.write_bytes(data)
        assert step_found() == 1
        error = error_of(lambda: save(2), CheckpointError)
        assert step_found() == (1 if error else 2)
        for path in tmp_path.iterdir():
            if path != good:
                path.unlink()

    files = st.lists(st.tuples(names, numbers, st.binary(max_size=9)), max_size=4)
    effort.fuzz("folders of checkpoints", files, check, 60)


@pytest.mark.smoke
def test_messages_between_ranks_are_understood_or_refused(effort: Effort) -> None:
    def check(text: str) -> None:
        if not error_of(lambda: StoreAddress.loads(text), RendezvousError):
            assert 0 < StoreAddress.loads(text).port < 65536

    lists = altered(["host", ["10.0.0.1", "10.0.0.2"], 4711])
    effort.fuzz("invitations", lists | altered({"a": 1, "b": 2, "3": 3}), check)
    for message in (
        control_channel.RankHello("t", 0, "h"),
        control_channel.RankEnded(1, 0.0, False, "x"),
        control_channel.RankFailing("x"),
    ):
        parse = partial(control_channel.loads, type(message))
        texts = altered(asdict(message))
        effort.fuzz("messages to dualdist run", texts, lambda text, parse=parse: parse(text.encode(errors="replace")))


@pytest.mark.smoke
def test_the_record_of_a_build_is_read_or_refused(effort: Effort) -> None:
    def check(text: str) -> None:
        if not error_of(lambda: from_json(text), ValueError, TypeError):
            from_json(text).fits("2.13.0+cpu")

    effort.fuzz("records of a build", altered(asdict(BuildRecord("0.28.1", torch="2.13.0+cpu"))), check)

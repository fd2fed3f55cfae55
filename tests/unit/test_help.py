"""--help fits a screen and has examples that are right; a shell completes."""

import argparse
import contextlib
import importlib.util
import io
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from harness.base_env import ROOT
from harness.installed import lack

from dualdist.cli import COMMANDS, EXAMPLES, build_parser, main
from dualdist.cli.bench import BENCHMARKS
from dualdist.cli.help_formatter import HEIGHT, WIDTH
from dualdist.launch.launchers import LAUNCHERS

HELPS = [(), *((name,) for name in COMMANDS), *(("bench", what) for what in BENCHMARKS)]


def shown(*words: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ending:
        build_parser(words[0] if words[0] in COMMANDS else None).parse_args(words)
    assert ending.value.code == 0
    return out.getvalue()


def examples(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("  ") and "dualdist " in line]


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_fits_a_screen_and_has_examples_that_the_command_knows(words: tuple[str, ...], flag: str) -> None:
    text = shown(*words, flag)
    lines = text.splitlines()
    assert len(lines) <= HEIGHT, text
    assert [line for line in lines if len(line) > WIDTH] == []
    assert examples(text)
    for example in examples(text):
        typed = shlex.split(example)
        own = typed[typed.index("dualdist") + 1 :]
        build_parser(own[0]).parse_args(own)
    listed = {(): (*COMMANDS, *EXAMPLES), ("bench",): BENCHMARKS}.get(words, ())
    assert [each for each in listed if each not in text] == []


@pytest.mark.parametrize("words", [words for words in HELPS[1:] if words != ("bench",)], ids=" ".join)
def test_all_options_can_be_seen(words: tuple[str, ...]) -> None:
    text = shown(*words, "--help-all")
    parser = build_parser(words[0])
    for word in words:
        (parts,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parser = parts.choices[word]
    options = [option for action in parser._actions for option in action.option_strings]
    assert [option for option in options if option not in text] == []


@pytest.fixture
def completing(base_env: Mapping[str, str]) -> Mapping[str, str]:
    if importlib.util.find_spec("argcomplete") is None:
        lack("argcomplete", "argcomplete", "pip install")
    return {**base_env, "PYTHONPATH": f"{base_env['PYTHONPATH']}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dualdist ", set(COMMANDS)),
        ("dualdist comp", {"compare"}),
        ("dualdist run --launcher ", set(LAUNCHERS)),
        ("dualdist run --backend h", {"horovod"}),
        ("dualdist run --tag", {"--tag-output"}),
        ("dualdist doctor --explain", {"--explain-env"}),
        ("dualdist doctor --backends native,m", {"native,mpi"}),
        ("dualdist bench ", set(BENCHMARKS)),
        ("dualdist bench step --model res", {"resnet18", "resnet50"}),
    ],
)
def test_a_shell_completes(completing: Mapping[str, str], line: str, expected: set[str]) -> None:
    """bash calls the function that the line defines when Tab is pressed."""
    script = (
        'eval "$(register-python-argcomplete dualdist)"; complete -p dualdist >&2; COMP_TYPE=9; '
        'COMP_POINT=${#COMP_LINE}; _python_argcomplete dualdist; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    env = {**completing, "COMP_LINE": line}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert "-F _python_argcomplete" in done.stderr, done
    found = {word.strip() for word in done.stdout.split("\n") if word.strip()} - {"-h", "--help"}
    assert found == expected or (line == "dualdist " and found - {"--version"} == expected), done


SHELLS = {"bash": ["--norc", "-i"], "zsh": ["-f", "-i"], "fish": ["--no-config", "--interactive"]}
REGISTER = 'eval "$(register-python-argcomplete dualdist)"'
# The lines of docs/pages/install.md.
LINES = {
    "bash": REGISTER,
    "zsh": f"autoload -U compinit && compinit; {REGISTER}",
    "fish": "register-python-argcomplete --shell fish dualdist | source",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_in_a_terminal_of_each_shell(completing: Mapping[str, str], shell: str, tmp_path: Path) -> None:
    """The line is typed, then `dualdist inf`, Tab and Enter, which runs `dualdist info`."""
    if shutil.which(shell) is None:
        lack(shell, shell)
    env = {**completing, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "TERM": "dumb"}
    ours, theirs = pty.openpty()
    start = ["setsid", "--ctty", shell, *SHELLS[shell]]
    job = subprocess.Popen(start, env=env, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        os.write(ours, f"{LINES[shell]}\rdualdist inf\t\rexit\r".encode())
        seen = read_terminal(ours)
    finally:
        os.close(ours)
        job.kill()
        job.wait()
    assert "backend single, rank 0 of 1" in seen, seen


def read_terminal(terminal: int) -> str:
    """Read until the shell ends, or is silent for too long."""
    seen = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal
        while select.select([terminal], [], [], 30.0)[0]:
            seen += os.read(terminal, 4096)
    return seen.decode(errors="replace")


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("run -np 2 --launchr spawn train.py", "usage: dualdist run .*did you mean '--launcher'[?]"),
        ("bench step --backands native", "usage: dualdist bench step .*did you mean '--backend'[?]"),
        ("runn -np 2 train.py", "usage: dualdist .*did you mean 'run'[?]"),
        ("hlep", "usage: dualdist .*did you mean 'help'[?]"),
        ("verison", "usage: dualdist .*did you mean 'version'[?]"),
        ("bench step --model resnet19", "usage: dualdist bench step .*did you mean 'resnet18'[?]"),
        ("bench stepp", "usage: dualdist bench .*did you mean 'step'[?]"),
        ("compare --zzz", "usage: dualdist compare .*unrecognized arguments: --zzz$"),
    ],
)
def test_mistyped_words_are_reported(line: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert re.search(output, message.strip(), re.DOTALL), message


@pytest.mark.parametrize(
    ("line", "output"),
    [("", "usage: dualdist COMMAND"), ("help", "usage: dualdist COMMAND"), ("help run", "usage: dualdist run"),
     ("bench", "usage: dualdist bench COMMAND"), ("version", "dualdist [0-9]")],
)  # fmt: skip
def test_help_and_version_are_words_too_and_no_word_is_help(
    line: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 0
    assert re.match(output, capsys.readouterr().out)


def test_a_closed_pipe_causes_no_traceback(base_env: Mapping[str, str]) -> None:
    line = "set -o pipefail; dualdist bench step --dry-run | true"
    outcome = subprocess.run(["bash", "-c", line], env=base_env, capture_output=True, text=True, timeout=60)
    assert (outcome.stderr, outcome.returncode) == ("", 141)

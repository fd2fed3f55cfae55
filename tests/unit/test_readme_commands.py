"""What the READMEs say to type: commands and options of ours that the command line knows, and targets of the Makefile.

Other tests run what stands in blocks of code; here nothing is passed over, in tables and sentences either.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from harness.base_env import ROOT

from dualdist.cli import COMMANDS, build_parser

FILES = (*sorted(path.relative_to(ROOT) for path in ROOT.glob("*/README.md")), Path("README.md"))
# Words before a command of ours that are no part of it: variables, and what starts it somewhere else.
BEFORE = r"(?:[A-Z_]+=\S+ +|docker run .*? dualdist +|docker compose exec hosta +|srun -n 1 +)*"
COMMAND = re.compile(rf"^{BEFORE}(dualdist (?:{'|'.join(COMMANDS)})\b.*)$")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def lines(text: str) -> list[str]:
    """Of all blocks of commands."""
    return [line for language, body in FENCED.findall(text) if language in ("", "sh") for line in body.splitlines()]


def inline(text: str) -> list[str]:
    """Code in sentences and tables."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCED.sub("", text))]


def ours(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted({(file, match[1]) for file, line in found if (match := COMMAND.match(line))})


TEXTS = {str(file): (ROOT / file).read_text() for file in FILES}
LINES = [(file, line) for file, text in TEXTS.items() for line in lines(text)]
INLINE = [(file, code) for file, text in TEXTS.items() for code in inline(text)]


def parser_of(command: str) -> argparse.ArgumentParser:
    (choices,) = (
        each.choices for each in build_parser(command)._actions if isinstance(each, argparse._SubParsersAction)
    )
    found: argparse.ArgumentParser = choices[command]
    return found


def test_there_are_commands_to_hold_against_the_parser() -> None:
    assert {file for file, _ in ours(LINES)} >= {
        "README.md",
        "launch/README.md",
        "docker/README.md",
        "examples/README.md",
    }
    assert len(ours(LINES)) > 30
    assert len(ours(INLINE)) > 10


@pytest.mark.parametrize(("file", "line"), ours(LINES))
def test_a_command_that_a_readme_shows_is_understood(file: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    try:
        build_parser(words[0]).parse_args(words)
    except SystemExit as ended:
        pytest.fail(f"{file}: {line}: not understood, exit code {ended.code}")


@pytest.mark.parametrize(("file", "code"), ours(INLINE))
def test_an_option_that_a_readme_names_is_known(file: str, code: str) -> None:
    words = shlex.split(code, comments=True)
    known = parser_of(words[1])
    subparsers = [each for each in known._actions if isinstance(each, argparse._SubParsersAction)]
    if subparsers:
        known = subparsers[0].choices[words[2]]
    for word in words[2:]:
        if word == "--" or word.endswith(".py"):
            break  # what follows is the program's
        option = word.partition("=")[0]
        assert not option.startswith("--") or option in known._option_string_actions, f"{file}: {option}"


@pytest.mark.parametrize(("file", "line"), sorted({each for each in [*LINES, *INLINE] if each[1].startswith("make ")}))
def test_a_target_of_make_in_a_readme_is_there(file: str, line: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in shlex.split(line, comments=True)[1:] if "=" not in word} <= targets, file

"""--help that fits a screen, with examples; --help-all with every option; and what a shell may complete."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dualdist.utils.suggest import did_you_mean

WIDTH, HEIGHT = 80, 24
COLUMN = 24
SHORT, ALL = ("-h", "--help"), "--help-all"


class _Shows(argparse.Action):
    """Prints a text and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, **known: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=known["help"])
        self._common: Mapping[str, str] | None = known["common"]
        self._examples: Sequence[str] = known["examples"]

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        text = parser.format_help() if self._common is None else format_short_help(parser, self._common, self._examples)
        parser._print_message(text, sys.stdout)
        parser.exit()


def add_help(parser: argparse.ArgumentParser, common: Mapping[str, str], examples: Sequence[str]) -> None:
    """--help shows the options of `common`, in these words, and --help-all everything."""
    about: Any = {"action": _Shows, "examples": examples}
    parser.add_argument(*SHORT, **about, common=common, help="show the usual options and examples")
    parser.add_argument(ALL, **about, common=None, help="show all options")


def format_short_help(parser: argparse.ArgumentParser, common: Mapping[str, str], examples: Sequence[str]) -> str:
    """Usage, what it does, examples, the usual options, a line each, and what the exit code says."""
    actions = {action.dest: action for action in parser._actions}
    usage = parser.usage or f"{parser.prog} [option ...]"
    lines = [f"usage: {usage}", "", parser.description or "", ""]
    lines += [f"  {example}" for example in examples]
    if common:
        lines.append("")
    lines += [_line(_shown(actions[dest]), text) for dest, text in common.items()]
    if parser.epilog:
        lines += ["", *textwrap.wrap(parser.epilog, WIDTH)]
    left = sum(bool(action.option_strings) for action in parser._actions) - len(common) - len(SHORT)
    if left > 0:
        lines += ["", f"{parser.prog} {ALL}: {left} more options"]
    return "\n".join(lines) + "\n"


def format_command_list(parser: argparse.ArgumentParser, choices: Mapping[str, str], examples: Sequence[str]) -> str:
    """The help of a command that has sub-commands: their names, and what each does."""
    lines = [f"usage: {parser.prog} COMMAND [option ...]", "", parser.description or "", ""]
    lines += [_line(name, text) for name, text in choices.items()]
    lines += ["", *(f"  {example}" for example in examples), "", f"{parser.prog} COMMAND --help says more."]
    return "\n".join(lines) + "\n"


def _shown(action: argparse.Action) -> str:
    metavar = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
    value = metavar if isinstance(metavar, str) and action.nargs != 0 else ""
    return f"{', '.join(action.option_strings)} {value}".strip() if action.option_strings else value


def _line(name: str, text: str) -> str:
    if len(name) > COLUMN - 4:  # longer names push their text to the right
        return f"  {name}  {text}"
    return f"  {name:<{COLUMN - 2}}{text}"


class ShowsList(argparse.Action):
    """--help of a command that has sub-commands."""

    def __init__(self, option_strings: Sequence[str], dest: str, **known: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._choices: Mapping[str, str] = known["listed"]
        self._examples: Sequence[str] = known["examples"]

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser._print_message(format_command_list(parser, self._choices, self._examples), sys.stdout)
        parser.exit()


def add_list(parser: argparse.ArgumentParser, choices: Mapping[str, str], examples: Sequence[str]) -> None:
    """--help lists the sub-commands."""
    about: Any = {"action": ShowsList, "listed": choices, "examples": examples}
    parser.add_argument(*SHORT, **about)


def reject_unknown(parser: argparse.ArgumentParser, words: Sequence[str], unknown: Sequence[str]) -> NoReturn:
    """End the program in the name of the sub-command among the words, which does not know these of them."""
    while chosen := next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None):
        parser = chosen.choices[next(word for word in words if word in chosen.choices)]
    option = unknown[0].partition("=")[0]
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(option, parser._option_string_actions)}")


def set_completions(parser: argparse.ArgumentParser, values: Mapping[str, Sequence[str]]) -> None:
    """A shell completes these options' values, where argcomplete is installed; it reads this attribute of actions."""
    for action in parser._actions:
        if action.dest in values:
            action.completer = _Values(values[action.dest])  # type: ignore[attr-defined]


class _Values:
    """Completes words, also after a comma, where lists are meant."""

    def __init__(self, values: Sequence[str]) -> None:
        self._values = values

    def __call__(self, prefix: str, **known: Any) -> list[str]:
        head, comma, _ = prefix.rpartition(",")
        return [f"{head}{comma}{value}" for value in self._values]

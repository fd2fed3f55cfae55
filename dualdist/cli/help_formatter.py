"""Help of the command line: --help on one screen, with examples; --help-all with every option; shell completion."""

import argparse
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from dualdist.utils.suggest import did_you_mean

WIDTH, HEIGHT = 80, 24
COLUMN = 24
SHORT, ALL = ("-h", "--help"), "--help-all"


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors suggest the choice that was meant, or one of `words`, which are no choices but work.

    The value of an option in `dashed` may begin with a dash, as in --directive --exclusive.
    """

    words: Sequence[str] = ()
    dashed: Sequence[str] = ("--directive",)
    _previous = ""

    def _parse_optional(self, arg_string: str) -> Any:
        """Return None for a value; argparse asks for each argument once, in their order."""
        previous, self._previous = self._previous, arg_string
        return None if previous in self.dashed else super()._parse_optional(arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            hint = did_you_mean(value, [*choices, *self.words])
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {', '.join(choices)}){hint}")


class _PrintHelp(argparse.Action):
    """Print the text that `render(parser)` returns, and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, help: str, render: Callable[..., str]) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self._render = render

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser._print_message(self._render(parser), sys.stdout)
        parser.exit()


def add_help(parser: argparse.ArgumentParser, common: Mapping[str, str], examples: Sequence[str]) -> None:
    """Let --help show the options in `common`, by dest, with these texts or their own, and --help-all all options."""
    parser.usage = parser.usage or f"{parser.prog} [option ...]"
    render: Any = partial(format_short_help, common=common, examples=examples)
    parser.add_argument(*SHORT, action=_PrintHelp, render=render, help="show the usual options and examples")
    render = argparse.ArgumentParser.format_help
    parser.add_argument(ALL, action=_PrintHelp, render=render, help="show all options")


def add_list(parser: argparse.ArgumentParser, choices: Mapping[str, str], examples: Sequence[str]) -> None:
    """Let --help list the sub-commands."""
    render: Any = partial(format_command_list, choices=choices, examples=examples)
    parser.add_argument(*SHORT, action=_PrintHelp, render=render, help=argparse.SUPPRESS)


def format_short_help(parser: argparse.ArgumentParser, common: Mapping[str, str], examples: Sequence[str]) -> str:
    """Return usage, description, examples, the usual options with a line each, and the exit codes."""
    actions = {action.dest: action for action in parser._actions}
    lines = [f"usage: {parser.usage}", "", parser.description or "", ""]
    lines += [f"  {example}" for example in examples]
    if common:
        lines.append("")
    lines += [_format_line(_format_option(actions[d]), text or actions[d].help or "") for d, text in common.items()]
    if parser.epilog:
        lines += ["", *textwrap.wrap(parser.epilog, WIDTH)]
    left = sum(bool(action.option_strings) for action in parser._actions) - len(common) - len(SHORT)
    if left > 0:
        lines += ["", f"{parser.prog} {ALL}: {left} more option{'s' * (left > 1)}"]
    return "\n".join(lines) + "\n"


def format_command_list(parser: argparse.ArgumentParser, choices: Mapping[str, str], examples: Sequence[str]) -> str:
    """Return the help of a command with sub-commands: their names and summaries."""
    lines = [f"usage: {parser.prog} COMMAND [option ...]", "", parser.description or "", ""]
    lines += [_format_line(name, text) for name, text in choices.items()]
    lines += ["", *(f"  {example}" for example in examples), "", f"{parser.prog} COMMAND --help shows its options."]
    return "\n".join(lines) + "\n"


def _format_option(action: argparse.Action) -> str:
    metavar = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
    value = metavar if isinstance(metavar, str) and action.nargs != 0 else ""
    return f"{', '.join(action.option_strings)} {value}".strip() if action.option_strings else value


def _format_line(name: str, text: str) -> str:
    return f"  {f'{name}  ':<{COLUMN - 2}}{text}"  # longer names push their text to the right


def reject_unknown(parser: argparse.ArgumentParser, words: Sequence[str], unknown: Sequence[str]) -> NoReturn:
    """Exit with the usage of the sub-command among the words, and an error about the unknown ones."""
    while chosen := next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None):
        parser = chosen.choices[next(word for word in words if word in chosen.choices)]
    option = unknown[0].partition("=")[0]
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(option, parser._option_string_actions)}")


def set_completions(parser: argparse.ArgumentParser, values: Mapping[str, Sequence[str]]) -> None:
    """Set the values that a shell completes for options, by dest; argcomplete reads this attribute of actions."""

    def complete(words: Sequence[str], prefix: str, **known: Any) -> list[str]:
        head, comma, _ = prefix.rpartition(",")  # also in a list with commas
        return [f"{head}{comma}{word}" for word in words]

    for action in parser._actions:
        if action.dest in values:
            action.completer = partial(complete, values[action.dest])  # type: ignore[attr-defined]

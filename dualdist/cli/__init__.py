# PYTHON_ARGCOMPLETE_OK
"""The command `dualdist`: each sub-command is a module, imported only when it is used."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from dualdist.cli.help_formatter import CommandParser, add_help, add_list, reject_unknown
from dualdist.errors import DualdistError, UsageError
from dualdist.utils.tracebacks import is_debug
from dualdist.version import __version__

# Set by a shell that completes a line, with the line so far.
COMPLETING, COMP_LINE = "_ARGCOMPLETE", "COMP_LINE"

# Each module has EXAMPLES, COMMON, configure(parser) and run(args) -> exit code, or a function to call last; one with
# sub-commands has no COMMON, and adds its help itself.
COMMANDS = {
    "doctor": ("dualdist.cli.doctor", "find what would not work here, why, and how to fix it"),
    "info": ("dualdist.cli.info", "show in one line which backend this process would get"),
    "run": ("dualdist.cli.run", "run a program on several ranks, by any launcher"),
    "exec": ("dualdist.cli.exec", "run a script as it is, as a rank of any launcher"),
    "top": ("dualdist.cli.top", "show what each rank of a running job is doing now"),
    "compare": ("dualdist.cli.compare", "find the fastest backend for this machine"),
    "bench": ("dualdist.cli.bench", "time steps, allreduce and start-up against raw libraries"),
    "install-horovod": ("dualdist.cli.install_horovod", "build and install Horovod"),
}
EXAMPLES = ("dualdist run -np 2 train.py", "dualdist compare --budget 5m", "dualdist doctor --run -np 2")


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser; only the chosen sub-command has its options, so that --help imports little."""
    about = "One PyTorch script, three communication backends."
    parser = CommandParser(prog="dualdist", description=about, add_help=False)
    parser.words = ("help", "version")
    add_list(parser, {name: summary for name, (_, summary) in COMMANDS.items()}, EXAMPLES)
    parser.add_argument("--version", action="version", version=f"dualdist {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        description = summary[0].upper() + summary[1:] + "."
        # No abbreviations: an argument of the program, such as --n, could be one of several options.
        subparser = subparsers.add_parser(
            name, help=summary, description=description, add_help=False, allow_abbrev=False
        )
        if name == chosen:
            command = importlib.import_module(module)
            command.configure(subparser)
            if hasattr(command, "COMMON"):
                add_help(subparser, command.COMMON, command.EXAMPLES)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; return 0 for success, 2 for wrong usage, 1 or its ERROR_CODE for an error."""
    arguments = _as_options(sys.argv[1:] if argv is None else argv)
    typed = os.environ.get(COMP_LINE, "").split() if COMPLETING in os.environ else arguments
    try:
        parser = build_parser(next((word for word in typed if word in COMMANDS), None))
    except DualdistError as error:  # backends of two packages have the same name
        print(f"dualdist: {error}", file=sys.stderr)
        return 2
    if COMPLETING in os.environ:
        _complete(parser)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        reject_unknown(parser, arguments, unknown)
    outcome = _run(parsed)
    if callable(outcome):  # a program of the user, whose errors are its own
        outcome()
        return 0
    return int(outcome)


def _run(parsed: argparse.Namespace) -> Any:
    """Run the sub-command, and return its exit code, or the function to call last."""
    module = importlib.import_module(COMMANDS[parsed.command][0])
    try:
        outcome = module.run(parsed)
        if sys.stdout is not None:  # a daemon may have closed stdout
            sys.stdout.flush()
        return outcome
    except DualdistError as error:
        if is_debug(os.environ):
            raise
        print(f"dualdist {parsed.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else int(getattr(module, "ERROR_CODE", 1))
    except KeyboardInterrupt:
        print(f"dualdist {parsed.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone, as in `dualdist ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        return 128 + signal.SIGPIPE
    except Exception:  # a bug: show its traceback
        traceback.print_exc()
        return int(getattr(module, "ERROR_CODE", 1))


def _as_options(words: Sequence[str]) -> list[str]:
    """Return the arguments, with --help for none and for the word `help`, and --version for the word `version`."""
    if not words or words[0] == "help":
        return [*words[1:], "--help"]
    if list(words) == ["bench"]:  # `bench` has sub-commands as well
        return ["bench", "--help"]
    return ["--version"] if words[0] == "version" else list(words)


def _complete(parser: argparse.ArgumentParser) -> None:
    """Complete the line for the shell, and exit; without argcomplete do nothing."""
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)

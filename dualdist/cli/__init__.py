"""The command `dualdist`: one small file a sub-command, loaded only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from dualdist.errors import DualdistError
from dualdist.version import __version__

DEBUG = "DUALDIST_DEBUG"

# Each module has configure(parser) and run(args) -> exit code.
COMMANDS = {
    "doctor": ("dualdist.cli.doctor", "say what this process is in the job, and which backends it can use"),
    "run": ("dualdist.cli.run", "run a program on several ranks, by any launcher"),
    "compare": ("dualdist.cli.compare", "say which backend is the fastest here, by training the same on each"),
    "bench": ("dualdist.cli.bench", "measure steps, allreduces and start-up beside the raw libraries"),
    "install-horovod": ("dualdist.cli.install_horovod", "download, adapt, build, install and verify Horovod"),
}


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser in which only the chosen sub-command's options are filled in, so that --help stays quick."""
    parser = argparse.ArgumentParser(prog="dualdist", description="One PyTorch script, three communication backends.")
    parser.add_argument("--version", action="version", version=f"dualdist {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            importlib.import_module(module).configure(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; the exit code is 0 for success, 1 for an error of ours, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if word in COMMANDS), None)
    parsed = build_parser(chosen).parse_args(arguments)
    try:
        return int(importlib.import_module(COMMANDS[parsed.command][0]).run(parsed))
    except DualdistError as error:
        if os.environ.get(DEBUG):
            raise
        print(f"dualdist {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130

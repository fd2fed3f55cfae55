"""The parser of the examples' flags: --help begins with the program's docstring, in which an example stands."""

from __future__ import annotations

import argparse


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False
        return action.help if says_nothing else super()._get_help_string(action)


def parser(docstring: str | None, program: str | None = None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        program, f"{program or '%(prog)s'} [options]", docstring, formatter_class=_Formatter, allow_abbrev=False
    )

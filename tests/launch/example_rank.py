"""A rank that runs examples on request, one after the other in one process: python example_rank.py EXAMPLES."""

import contextlib
import io
import os
import runpy
import shlex
import sys

from harness.rank_pool import serve


def run(line: str) -> str:
    """Run `[-m MODULE] SCRIPT ARGUMENTS` as python would, and return what it printed."""
    words = shlex.split(line)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])  # where a script finds what lies beside it
    serve(int(os.environ["RANK"]), run)

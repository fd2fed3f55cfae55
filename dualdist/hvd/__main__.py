"""`python -m dualdist.hvd script.py ...`: run a program for Horovod; its `import horovod.torch` finds dualdist."""

import sys
from typing import NoReturn

from dualdist.errors import UsageError
from dualdist.hvd.alias import install
from dualdist.utils.main_program import find_module, find_script

USAGE = """\
usage: python -m dualdist.hvd script.py [argument ...]
       python -m dualdist.hvd -m module [argument ...]

Runs a program that was written for Horovod, as python would, on dualdist: in it `import horovod.torch` finds
dualdist.hvd. Start it under any launcher, e.g. torchrun --nproc-per-node=2 -m dualdist.hvd script.py\
"""
UNUSABLE = 2


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name."""
    match arguments:
        case [] | ["-m"]:
            _give_up(USAGE)
        case ["-h" | "--help", *_]:
            print(USAGE)
            return
    install()  # first, since finding a module imports its parent packages
    is_module = arguments[0] == "-m"
    try:
        run = find_module(arguments[1], arguments[2:]) if is_module else find_script(arguments[0], arguments[1:])
    except UsageError as error:
        _give_up(f"{sys.executable}: {error}", 1 if is_module else UNUSABLE)
    run()


def _give_up(message: str, code: int = UNUSABLE) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

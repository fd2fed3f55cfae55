"""`dualdist exec`: run a program in this process as one rank, with the variables that torch.distributed reads."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from dualdist.backends.mpi import world
from dualdist.environments import detect
from dualdist.errors import UsageError
from dualdist.launch.exec_env import check_torch_backend, prepare
from dualdist.launch.nested_launcher import refuse_launcher
from dualdist.launch.run_request import TORCH_BACKEND as TORCH_BACKEND_HELP
from dualdist.utils.main_program import find_module, find_script, set_first_folder
from dualdist.utils.variables import TORCH_BACKEND

EXAMPLES = (
    "mpirun -np 4 dualdist exec train.py --lr 0.1",
    "srun -n 4 dualdist exec -m package.train",
    "mpirun -np 4 dualdist exec -- ./run.sh",
)
COMMON = {"verbose": "", "torch_backend": "torch's backend in place of those that the script names", "timeout": ""}
# As python's and a shell's.
UNUSABLE, MISSING, NOT_EXECUTABLE = 2, 127, 126
GLOO_S = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "LAUNCHER dualdist exec [option ...] [-m | --] program [argument ...]"
    add("-v", "--verbose", action="store_true", help="say which rank this is, and which variables were set")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds to wait for the other ranks (default: 300)")
    add("--torch-backend", metavar="NAME", help=TORCH_BACKEND_HELP)
    add("-m", dest="is_module", action="store_true", help="the program is a module, as for python -m")
    add("program", nargs=argparse.REMAINDER, help="a script or module, or after -- any program, and its arguments")


def run(args: argparse.Namespace) -> Callable[[], None]:
    """Meet the other ranks, and return what runs the program."""
    if args.program in ([], ["--"]):
        raise UsageError("no program: expected dualdist exec script.py, -m module, or -- program")
    if args.torch_backend is not None:
        os.environ[TORCH_BACKEND] = args.torch_backend
    check_torch_backend(os.environ)
    refuse_launcher(args.program, detect(os.environ), is_module=args.is_module)
    topology, variables = prepare(os.environ, args.timeout)
    if args.verbose:
        place = f"rank {topology.rank} of {topology.size}, from {topology.source}"
        given = " ".join(f"{name}={value}" for name, value in variables.items()) or "nothing"
        sys.stderr.write(f"dualdist exec: {place}; set {given}\n")  # one write, as all ranks write to one terminal
    return partial(_run, args.program, is_module=args.is_module)


def _run(words: list[str], *, is_module: bool) -> None:
    """Run the program, which ends this process as it would end Python."""
    if words[0] == "--":
        _become(words[1:])
    try:
        if is_module:
            set_first_folder(os.getcwd())
        program = (find_module if is_module else find_script)(words[0], words[1:])
    except UsageError as error:
        hint = "" if is_module else "; type -m before a module, -- before any other program"
        print(f"dualdist exec: {error}{hint}", file=sys.stderr)
        raise SystemExit(UNUSABLE) from None
    try:
        program()
    except SystemExit as end:
        if end.code:
            world.leave_to_launcher()
        raise
    finally:
        # Gloo's threads free the tensors of the last collectives: at the interpreter's end that aborts the process.
        # DistributedDataParallel keeps them beyond destroy_process_group() (torch 2.13; pytorch pull request 179291).
        if "torch.distributed" in sys.modules:
            time.sleep(GLOO_S)


def _become(words: list[str]) -> NoReturn:
    """Replace this process by the program; exit as a shell does if that is impossible."""
    world.finish()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"dualdist exec: {words[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(MISSING if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE) from None

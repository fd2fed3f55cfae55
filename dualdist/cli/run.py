"""`dualdist run`: the options, and a program started on several ranks by a launcher."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualdist.cli import schedule
from dualdist.errors import UsageError
from dualdist.launchers import LAUNCHERS, Command, Job, command
from dualdist.launchers.run import look
from dualdist.launchers.run import run as run_command

FACE = ("-m", "dualdist.hvd")
BACKENDS = ("native", "horovod", "mpi", "auto")
SLURM_JOB = "SLURM_JOB_ID"


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of this sub-command."""
    add = parser.add_argument
    parser.usage = "dualdist run [option ...] [-m] program [argument ...]"
    add("-np", "--ranks", type=int, metavar="N", help="how many ranks (default: 1, or what --scheduler gives)")
    add(
        "--launcher",
        metavar="NAME",
        help=f"what starts them: {', '.join(LAUNCHERS)} (default: mpirun for the backend mpi, srun in a Slurm "
        "allocation, else torchrun)",
    )
    add(
        "--backend",
        choices=BACKENDS,
        help="what moves their tensors (default: what DUALDIST_BACKEND says, else auto, or native with --as-horovod)",
    )
    add(
        "--as-horovod",
        action="store_true",
        help="the program was written for Horovod: in it `import horovod.torch` finds dualdist.hvd",
    )
    add("--dry-run", action="store_true", help="print the command line and do nothing")
    add("-m", dest="is_module", action="store_true", help="the program is a module, as for python -m")
    schedule.configure(parser)
    add("program", nargs=argparse.REMAINDER, help="a script or module, and its arguments")
    parser.epilog = "Exit code: the job's own."


def run(args: argparse.Namespace) -> int:
    """Run the job to its end, or print its command line; its exit code."""
    words = tuple(args.program[1:] if args.program[:1] == ["--"] else args.program)
    found = program(words, is_module=args.is_module, as_horovod=args.as_horovod)
    if args.scheduler is not None:
        return schedule.run(args, found, launcher=args.launcher, ranks=args.ranks, backend=args.backend)
    schedule.refuse_stray(args)
    job = Job(found, 1 if args.ranks is None else args.ranks, args.backend)
    launcher = args.launcher
    if launcher is None:
        launcher, reason = default_launcher(os.environ, args.backend)
        print(f"dualdist run: {launcher} starts {job.ranks} rank(s), as {reason}", file=sys.stderr)
    built = command(launcher, job, look())
    if args.dry_run:
        print(line(built))
        return 0
    code = run_command(built, timeout_s=None, what="the job", capture=False).code
    return code if code >= 0 else 128 - code  # as a shell does for a launcher that a signal ended


def default_launcher(environ: Mapping[str, str], backend: str | None) -> tuple[str, str]:
    """The launcher where none was named, and why this one."""
    if backend == "mpi":
        return "mpirun", "no --launcher was named and the backend mpi needs one that starts MPI"
    if environ.get(SLURM_JOB):
        return "srun", f"no --launcher was named and this is a Slurm allocation ({SLURM_JOB}={environ[SLURM_JOB]})"
    return "torchrun", f"no --launcher was named and this is no Slurm allocation ({SLURM_JOB} is not set)"


def program(words: Sequence[str], *, is_module: bool, as_horovod: bool) -> tuple[str, ...]:
    """What follows `python` on a rank; UsageError where nothing could be run."""
    if not words:
        raise UsageError("no program: expected dualdist run [option ...] script.py, or -m and a module")
    if not is_module and not Path(words[0]).exists():
        is_python = Path(words[0]).name.startswith("python")
        hint = "leave the interpreter out, as in dualdist run -np 2 train.py" if is_python else "or -m for a module?"
        raise UsageError(f"there is no script {words[0]!r} in {Path.cwd()}; {hint}")
    return (*(FACE if as_horovod else ()), *(("-m",) if is_module else ()), *words)


def line(built: Command) -> str:
    """The command as one would type it in a shell, with the variables that it needs."""
    variables = [f"{name}={value}" for name, value in built.env.items()]
    return shlex.join([*(["env", *variables] if variables else []), *built.argv])

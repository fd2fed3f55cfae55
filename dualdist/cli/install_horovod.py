"""`dualdist install-horovod`: the options, and a build that ends cleanly when it is stopped."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from dualdist.horovod_build.machine import HOROVOD_VERSION, BuildOptions

EXAMPLES = ("dualdist install-horovod", "dualdist install-horovod --gpu --force", "dualdist install-horovod --dry-run")
COMMON = {
    "gpu": "build with NCCL for GPUs; needs nvcc and a CUDA torch",
    "without_mpi": "build with Gloo alone",
    "jobs": "compile N files at a time",
    "force": "build anew, whatever is installed or in the cache",
    "dry_run": "print the steps and do nothing",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of this sub-command."""
    add = parser.add_argument
    add("--gpu", action="store_true", help="build with NCCL for tensors on GPUs; needs nvcc and a CUDA build of torch")
    add("--without-mpi", action="store_true", help="build with Gloo alone")
    add("--version", default=HOROVOD_VERSION, metavar="X.Y.Z", help=f"another Horovod than {HOROVOD_VERSION}")
    add(
        "--jobs",
        type=_positive,
        metavar="N",
        help="compile N files at a time (default: what processors and memory carry)",
    )
    add("--force", action="store_true", help="build anew, whatever is installed or in the cache")
    add("--dry-run", action="store_true", help="print the steps and do nothing")


def run(args: argparse.Namespace) -> int:
    """Install Horovod; returns 0, or raises BuildError."""
    from dualdist.horovod_build.install import install_horovod

    options = BuildOptions(
        version=args.version,
        gpu=args.gpu,
        mpi=not args.without_mpi,
        force=args.force,
        dry_run=args.dry_run,
        jobs=args.jobs,
    )
    # make and batch systems stop a process so; as an exception it ends the compilers and removes the temporary folder.
    signal.signal(signal.SIGTERM, _interrupt)
    install_horovod(options, os.environ, sys.stdout)
    return 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} jobs, expected 1 or more")
    return number

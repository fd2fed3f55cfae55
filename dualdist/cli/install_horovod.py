"""`dualdist install-horovod`: the options, and a clean end of the build on SIGTERM."""

import argparse
import os
import sys

from dualdist.horovod_build.machine import BuildOptions
from dualdist.launch.processes import termination_raises

EXAMPLES = ("dualdist install-horovod", "dualdist install-horovod --gpu --force", "dualdist install-horovod --dry-run")
COMMON = dict.fromkeys(("gpu", "without_mpi", "jobs", "force", "dry_run"), "")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpu", action="store_true", help="build with NCCL; needs nvcc and a CUDA build of torch")
    add("--without-mpi", action="store_true", help="build with Gloo only")
    add("--jobs", type=_positive, metavar="N", help="files to compile at a time (default: as cores allow)")
    add("--force", action="store_true", help="rebuild, even if installed or in the cache")
    add("--dry-run", action="store_true", help="print the commands without running them")


def run(args: argparse.Namespace) -> int:
    """Install Horovod; return 0, or raise BuildError."""
    from dualdist.horovod_build.install import install_horovod

    options = BuildOptions(
        gpu=args.gpu,
        mpi=not args.without_mpi,
        force=args.force,
        dry_run=args.dry_run,
        jobs=args.jobs,
    )
    with termination_raises():  # SIGTERM of make or a batch system ends the compilers and deletes temporary files
        install_horovod(options, os.environ, sys.stdout)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} jobs, expected 1 or more")
    return number

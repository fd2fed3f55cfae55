"""What starts the ranks: a launcher is a function from a Job to the Command a person would type, and nothing else."""

from __future__ import annotations

import difflib
import importlib

from dualdist.errors import UsageError
from dualdist.launchers.base import Command, Job, Site

# name: module of this package and function(job, site) -> Command.
LAUNCHERS = {
    "python": ("python", "command"),
    "torchrun": ("torchrun", "command"),
    "horovodrun": ("horovodrun", "gloo_command"),
    "horovodrun-mpi": ("horovodrun", "mpi_command"),
    "mpirun": ("mpirun", "command"),
    "srun": ("srun", "command"),
}


def command(launcher: str, job: Job, site: Site) -> Command:
    """The command by which this launcher starts the job; LaunchError where the site lacks what it needs."""
    if launcher not in LAUNCHERS:
        close = difflib.get_close_matches(launcher, LAUNCHERS, 1, cutoff=0)[0]
        raise UsageError(f"launcher {launcher!r}: expected one of {', '.join(LAUNCHERS)}; did you mean {close!r}?")
    module, function = LAUNCHERS[launcher]
    built = getattr(importlib.import_module(f"dualdist.launchers.{module}"), function)(job, site)
    assert isinstance(built, Command)
    return built


__all__ = ["LAUNCHERS", "Command", "Job", "Site", "command"]

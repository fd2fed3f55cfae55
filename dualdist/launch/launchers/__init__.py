"""What starts the ranks: a launcher is a function from a Job to the Commands a person would type, and nothing else."""

from __future__ import annotations

import importlib

from dualdist.launch.job import Command, Host, Job, RendezvousAddress, Site
from dualdist.utils.suggest import require_choice

# name: module of this package and function(job, site) -> tuple of Commands.
LAUNCHERS = {
    "python": ("python", "commands"),
    "torchrun": ("torchrun", "commands"),
    "horovodrun": ("horovodrun", "gloo_commands"),
    "horovodrun-mpi": ("horovodrun", "mpi_commands"),
    "mpirun": ("mpirun", "commands"),
    "srun": ("srun", "commands"),
    "spawn": ("spawn", "commands"),
}

STARTERS = tuple(name for name in LAUNCHERS if name != "python")  # of several ranks


def commands(launcher: str, job: Job, site: Site) -> tuple[Command, ...]:
    """The commands that together are the job; LaunchError where the site lacks what the launcher needs."""
    module, function = LAUNCHERS[known(launcher)]
    built: tuple[Command, ...] = getattr(importlib.import_module(f"dualdist.launch.launchers.{module}"), function)(
        job, site
    )
    return built


def known(launcher: str) -> str:
    """The launcher; UsageError, with the nearest, where there is none of this name."""
    return require_choice(launcher, LAUNCHERS, "launcher")


def command(launcher: str, job: Job, site: Site) -> Command:
    """The only command of a job that this launcher starts with one, as all but spawn do on one host."""
    (built,) = commands(launcher, job, site)
    return built


__all__ = [
    "LAUNCHERS",
    "STARTERS",
    "Command",
    "Host",
    "Job",
    "RendezvousAddress",
    "Site",
    "command",
    "commands",
    "known",
]

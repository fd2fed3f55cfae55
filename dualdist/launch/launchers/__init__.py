"""Launchers: each is a pure function from a Job to the command lines that start its ranks."""

from __future__ import annotations

from dualdist.launch.job import Command, Job, Site
from dualdist.launch.launchers import horovodrun, mpirun, simple
from dualdist.utils.suggest import require_choice

LAUNCHERS = {
    "python": simple.python_commands,
    "torchrun": simple.torchrun_commands,
    "horovodrun": horovodrun.gloo_commands,
    "horovodrun-mpi": horovodrun.mpi_commands,
    "mpirun": mpirun.mpirun_commands,
    "srun": simple.srun_commands,
    "spawn": simple.spawn_commands,
}
MULTI_RANK_LAUNCHERS = tuple(name for name in LAUNCHERS if name != "python")


def build_commands(launcher: str, job: Job, site: Site) -> tuple[Command, ...]:
    """Return the commands that together start the job; LaunchError if the site lacks what the launcher needs."""
    return LAUNCHERS[check_launcher(launcher)](job, site)


def build_command(launcher: str, job: Job, site: Site) -> Command:
    """Return the only command of the job: every launcher but spawn needs one on a single host."""
    (command,) = build_commands(launcher, job, site)
    return command


def check_launcher(launcher: str) -> str:
    """Return the name if there is such a launcher; else UsageError with the nearest name."""
    return require_choice(launcher, LAUNCHERS, "launcher")

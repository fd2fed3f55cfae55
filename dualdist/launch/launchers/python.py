"""Plain python: one rank on this host."""

from dualdist.errors import LaunchError
from dualdist.launch.job import Command, Job, Site
from dualdist.launch.launchers.base import Launcher


def python_commands(job: Job, site: Site) -> tuple[Command, ...]:
    if job.ranks != 1 or job.hosts:
        raise LaunchError("plain python starts 1 rank on this host: choose a launcher, or call dd.spawn")
    return (Command((site.python, *job.program), job.variables()),)


PYTHON = Launcher("python", python_commands, is_single_rank=True)

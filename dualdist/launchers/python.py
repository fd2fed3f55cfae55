"""Plain python: one rank, no launcher."""

from __future__ import annotations

from dualdist.errors import LaunchError
from dualdist.launchers.base import Command, Job, Site


def command(job: Job, site: Site) -> Command:
    if job.ranks != 1:
        raise LaunchError(f"plain python starts 1 rank, not {job.ranks}: choose a launcher, or call dd.spawn")
    return Command((site.python, *job.program), job.variables())

"""Plain python: one rank, no launcher."""

from __future__ import annotations

from dualdist.errors import LaunchError
from dualdist.launch.job import Command, Job, Site


def commands(job: Job, site: Site) -> tuple[Command, ...]:
    if job.ranks != 1 or job.hosts:
        asked = f"{job.ranks} on {', '.join(host.name for host in job.hosts)}" if job.hosts else f"{job.ranks}"
        raise LaunchError(f"plain python starts 1 rank, not {asked}: choose a launcher, or call dd.spawn")
    return (Command((site.python, *job.program), job.variables()),)

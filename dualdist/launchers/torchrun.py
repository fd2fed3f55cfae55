"""torchrun, torch's own launcher."""

from __future__ import annotations

from dualdist.launchers.base import Command, Job, Site


def command(job: Job, site: Site) -> Command:
    # Standalone takes a free port, so that jobs do not collide; the loopback address needs no name service.
    flags = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={job.ranks}")
    return Command((site.tool("torchrun"), *flags, *job.program), job.variables())

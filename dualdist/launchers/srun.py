"""srun, inside a Slurm allocation or asking for one."""

from __future__ import annotations

from dualdist.launchers.base import Command, Job, Site


def command(job: Job, site: Site) -> Command:
    # Without the first flag Slurm waits for the other ranks when one has failed. Tasks inherit the variables.
    flags = ("--kill-on-bad-exit=1", "--nodes=1", f"--ntasks={job.ranks}")
    pmix = ("--mpi=pmix",) if job.transport == "mpi" else ()
    return Command((site.tool("srun"), *flags, *pmix, site.python, *job.program), job.variables())

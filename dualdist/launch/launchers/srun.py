"""srun, inside a Slurm allocation or asking for one."""

from __future__ import annotations

from collections.abc import Iterator

from dualdist.launch.job import Command, Job, Site


def commands(job: Job, site: Site) -> tuple[Command, ...]:
    # Without the first flag Slurm waits for the other ranks when one has failed. Tasks inherit all variables that
    # srun has, so it has no secrets but those that were named.
    flags = ["--kill-on-bad-exit=1", *_places(job), f"--ntasks={job.ranks}"]
    if site.task_cpus is not None:  # since 22.05 srun no longer takes it from the allocation
        flags.append(f"--cpus-per-task={site.task_cpus}")
    pmix = ("--mpi=pmix",) if job.transport == "mpi" or job.backend == "mpi" else ()
    without = tuple(name for name in site.secrets if name not in job.env)
    return (Command((site.tool("srun"), *flags, *pmix, site.python, *job.program), job.variables(), without=without),)


def _places(job: Job) -> Iterator[str]:
    if not job.hosts:
        if job.nodes is not None:
            yield f"--nodes={job.nodes}"
        return
    # Arbitrary: the list says of every rank where it runs, in order.
    yield "--distribution=arbitrary"
    yield "--nodelist=" + ",".join(host.name for host, ranks in job.filled() for _ in range(ranks))

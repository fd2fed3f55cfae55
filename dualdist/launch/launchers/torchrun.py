"""torchrun, torch's own launcher: one agent on each host."""

from __future__ import annotations

from dualdist.launch.job import Command, Job, Site


def commands(job: Job, site: Site) -> tuple[Command, ...]:
    torchrun, variables = site.tool("torchrun"), job.variables()
    if not job.hosts:
        # Standalone takes a free port, so that jobs do not collide; the loopback address needs no name service.
        restarts = (f"--max-restarts={job.max_restarts}",) if job.max_restarts else ()
        flags = ("--standalone", "--local-addr=127.0.0.1", *restarts, f"--nproc-per-node={job.ranks}")
        return (Command((torchrun, *flags, *job.program), variables),)
    # Static, as ranks then follow the order of the hosts; c10d numbers them by their addresses. Agents cannot restart
    # their ranks together by it: the whole job is restarted instead.
    filled, meeting = job.filled(), site.met()
    found = []
    for node, (host, ranks) in enumerate(filled):
        flags = (
            f"--nnodes={len(filled)}",
            f"--node-rank={node}",
            f"--nproc-per-node={ranks}",
            f"--master-addr={meeting.address}",
            f"--master-port={meeting.port}",
        )
        found.append(Command((torchrun, *flags, *job.program), variables, None if host.is_here else host.name))
    return tuple(found)

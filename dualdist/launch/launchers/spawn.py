"""No launcher: every rank is a command of its own, told its place by variables."""

from __future__ import annotations

from dualdist.launch.job import Command, Host, Job, Site


def commands(job: Job, site: Site) -> tuple[Command, ...]:
    filled, meeting = job.filled() or [(Host("", job.ranks, is_here=True), job.ranks)], site.met()
    found: list[Command] = []
    for node, (host, ranks) in enumerate(filled):
        for local_rank in range(ranks):
            place = {
                "DUALDIST_LAUNCHER": "spawn",
                "DUALDIST_RANK": str(len(found)),
                "DUALDIST_SIZE": str(job.ranks),
                "DUALDIST_LOCAL_RANK": str(local_rank),
                "DUALDIST_LOCAL_SIZE": str(ranks),
                "DUALDIST_NODE_RANK": str(node),
                "DUALDIST_NUM_NODES": str(len(filled)),
                "DUALDIST_ADDRESS": meeting.address,
                "DUALDIST_PORT": str(meeting.port),
            }
            where = None if host.is_here else host.name
            found.append(Command((site.python, *job.program), {**job.variables(), **place}, where))
    return tuple(found)

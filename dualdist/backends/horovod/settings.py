"""How Horovod is told its place and its controller: the variables that it reads when it starts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

from dualdist.rendezvous.rank_assignment import Place

Controller = Literal["gloo", "mpi"]
DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
Settings = dict[str, "str | None"]  # None: unset

# Without its own mpirun, Open MPI is a job of one, which would look for its daemon and abort where a relocated
# installation does not find it. So it starts, and under another MPI's mpirun the session sees the wrong size.
ALONE = {"OMPI_MCA_ess_singleton_isolated": "1"}


def slots_of(places: Sequence[Place]) -> list[Settings]:
    """Horovod's variables for every rank. Its cross rank counts the nodes that have this local rank."""
    local_sizes = Counter(place.node for place in places)
    columns: dict[int, list[int]] = defaultdict(list)
    for place in sorted(places, key=lambda place: place.node):
        columns[place.local_rank].append(place.node)
    cross_ranks = {(node, local): index for local, nodes in columns.items() for index, node in enumerate(nodes)}
    return [
        {
            "HOROVOD_HOSTNAME": f"node{place.node}",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(len(places)),
            "HOROVOD_LOCAL_RANK": str(place.local_rank),
            "HOROVOD_LOCAL_SIZE": str(local_sizes[place.node]),
            "HOROVOD_CROSS_RANK": str(cross_ranks[place.node, place.local_rank]),
            "HOROVOD_CROSS_SIZE": str(len(columns[place.local_rank])),
        }
        for rank, place in enumerate(places)
    ]


def settings_for(controller: Controller, timeout_s: float, *, makes_sets: bool) -> Settings:
    """Variables by which Horovod takes the controller, and reports a rank that does not come before our wait ends.

    Horovod's own end of a stalled job stays off: ours names the ranks, and knows of those that have joined. With
    `makes_sets` the engine adds process sets while it runs.
    """
    return {
        "HOROVOD_CONTROLLER": controller,
        "HOROVOD_CPU_OPERATIONS": controller,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": _seconds(timeout_s),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": _seconds(min(60, timeout_s / 2)),
        **({DYNAMIC_SETS: "1"} if makes_sets else {}),
    }


def _seconds(value: float) -> str:
    return str(max(1, round(value)))

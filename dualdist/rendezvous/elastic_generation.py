"""Which round of an elastic agent's ranks this is: its store, and what earlier ranks left there, outlives the ranks.

Note [rounds]: torchrun counts restarts on each host by itself, and those after which hosts have come or gone not at
all. So no variable says which round it is, and what lies in the store may be of an earlier one. Therefore every rank
but the first asks a question that nobody has asked before, and the first rank of the round answers with the number of
the round, which it has drawn. Questions of earlier rounds are answered, too; nobody hears that.
"""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.backends.base import Store
from dualdist.errors import RendezvousError
from dualdist.topology import Topology
from dualdist.utils.deadline import Deadline

MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
KEY = "dualdist/rounds"
POLL_S = 0.01


def may_restart(topology: Topology, environ: Mapping[str, str]) -> bool:
    """Whether there can be several rounds at one store: with restarts, and where hosts may come and go."""
    return topology.rendezvous == "agent" and (environ.get(MAX_RESTARTS, "0") != "0" or topology.num_nodes > 1)


def agree_on_generation(store: Store, topology: Topology, deadline: Deadline) -> str:
    """The number of this round, on all of its ranks, each of which calls this once: Note [rounds]."""
    rank, size = topology.rank, topology.size
    if rank == 0:
        number = str(store.add(f"{KEY}/begun", 1))
        _answer(store, number, size, deadline)
        return number
    mine = store.add(f"{KEY}/questions", 1)
    store.set(f"{KEY}/question/{mine}", str(rank))
    try:
        number = store.get(f"{KEY}/answer/{mine}", deadline.left_s())
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {rank} waited {deadline.timeout_s:g} s for rank 0 to call dd.init(): see what it printed last"
        ) from error
    store.add(f"{KEY}/{number}/here", 1)
    return number


def _answer(store: Store, number: str, size: int, deadline: Deadline) -> None:
    """Tell the number of the round to everybody who asks, until all ranks of the round know it."""
    answered = 0
    while (here := store.add(f"{KEY}/{number}/here", 0)) < size - 1:
        while store.has(f"{KEY}/question/{answered + 1}"):
            answered += 1
            store.set(f"{KEY}/answer/{answered}", number)
        if deadline.passed():
            raise RendezvousError(
                f"rank 0 waited {deadline.timeout_s:g} s for all {size} ranks to call dd.init(); "
                f"{size - 1 - here} of them did not"
            )
        deadline.sleep(POLL_S)

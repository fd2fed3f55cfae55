"""Records of a rendezvous: what is asked for before the ranks meet, and what is known when they are connected."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dualdist.backends.horovod.driver import is_elastic, next_slot
from dualdist.environments.horovodrun import ELASTIC
from dualdist.rendezvous.backend_selection import select_device
from dualdist.rendezvous.elastic_agent import ElasticAgent, has_agent
from dualdist.topology import RankLocation, Topology

if TYPE_CHECKING:
    import torch

    from dualdist.backends.base import Backend, InitContext, Store
    from dualdist.utils.saved_choices import SavedChoice


@dataclass
class RendezvousStore:
    """The store of this process's first rendezvous, for later sessions; rank 0 serves it while it lives.

    `generation` is that of the agent that started the ranks, if its store outlives them, or "". `agent` is the
    connection to `dualdist run --min-ranks`, if that started them.
    """

    store: Store | None = None
    generation: str = ""
    agent: ElasticAgent | None = None

    def next_key(self, environ: MutableMapping[str, str], sessions: int, timeout_s: float) -> str:
        """Return the prefix of the next session's keys: the same on all ranks, and not used before.

        An elastic launcher renumbers the ranks for each session (horovodrun, for each after the first): that changes
        `environ`, and the ranks meet anew, since another process may be rank 0 now.
        """
        if self.agent is not None or has_agent(environ):
            self.agent = self.agent or ElasticAgent(environ)
            environ.update(self.agent.next_variables(timeout_s))
            self.store = None
            return f"dualdist/{ELASTIC}"
        if not is_elastic(environ):
            return f"dualdist/{sessions + 1}"
        if sessions:
            environ.update(next_slot(environ, timeout_s))
            self.store, self.generation = None, ""
        return f"dualdist/{ELASTIC}"  # not numbered: ranks that were started later have had fewer sessions


@dataclass(frozen=True)
class Request:
    """The session that init() asks for, before its ranks have met."""

    topology: Topology
    environ: MutableMapping[str, str]
    transport: str  # requested, or ""
    key: str  # prefix of the session's keys in the store: the same on all ranks, different for every session
    timeout_s: float
    rendezvous: RendezvousStore
    sets_default_group: bool = True
    uses_gpu: bool = True  # if there is one

    def device(self, topology: Topology | None) -> torch.device:
        """Return the device of this rank, or only its type without a topology."""
        import torch

        return select_device(topology, self.transport) if self.uses_gpu else torch.device("cpu")

    def context(self, topology: Topology | None) -> InitContext:
        from dualdist.backends.base import InitContext

        device = self.device(topology)
        context = InitContext(self.topology, self.environ, self.transport, device, self.timeout_s, self.key)
        return replace(context, sets_default_group=self.sets_default_group)


@dataclass(frozen=True)
class Connected:
    """The ranks of a session, which have met and communicate over `backend`."""

    backend: Backend
    topology: Topology
    locations: Sequence[RankLocation]
    store: Store | None  # None if there is one rank
    key: str  # prefix of the session's keys in the store
    saved: SavedChoice | None = None  # that "auto" has taken

"""Stragglers: ranks that others waited for, by a collective call or in rank 0's report at exit."""

from __future__ import annotations

import atexit
import base64
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualdist.backends.base import Backend, Store
from dualdist.backends.control_plane import ControlAllgather
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.group import Group
from dualdist.errors import RendezvousError
from dualdist.monitoring.wait_times import SlowRanks, WaitTimes, summarize_waits
from dualdist.utils.deadline import Deadline
from dualdist.utils.suggest import format_ranks

if TYPE_CHECKING:
    from dualdist.rendezvous.open_session import Session

# Seconds that rank 0 waits for the others' wait times.
COLLECT_S = 5.0
POLL_S = 0.05


def slow_ranks(group: Group) -> SlowRanks:
    """Return the wait times since the last call, and reset them; all ranks of the group must call this."""
    name = group.next_name("slow_ranks")

    def perform(backend: Backend) -> SlowRanks:
        counted = group.wait_times or WaitTimes()
        group.wait_times = WaitTimes()
        return summarize_waits(group.ranks, ControlAllgather(backend, counted.dumps(), name).wait())

    return run_agreed(group, "slow_ranks", name, {}, perform)


class StragglerReport:
    """Prints the wait times on rank 0 at exit, once; collected through the store, as some ranks may have exited."""

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session if session.store is not None else None
        session.world.wait_times = WaitTimes()

    def __call__(self) -> None:
        atexit.unregister(self)
        session, self._session = self._session, None
        if session is None or not session.world.is_usable:
            return
        world, store, key = session.world, session.store, f"{session.key}/waits"
        assert store is not None, "checked in __init__"
        counted = (world.wait_times or WaitTimes()).dumps()
        try:
            if world.rank:
                store.set(f"{key}/{world.rank}", base64.b64encode(counted).decode())
                return
            dumps = {0: counted, **_collect(store, key, world.ranks[1:])}
        except (RendezvousError, TimeoutError):
            return  # rank 0 has exited
        silent = [rank for rank in world.ranks if rank not in dumps]
        missing = f" (nothing from {format_ranks(silent)})" if silent else ""
        summary = summarize_waits(sorted(dumps), [dumps[rank] for rank in sorted(dumps)])
        print(f"dualdist: {summary}{missing}", file=sys.stderr, flush=True)


def _collect(store: Store, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
    """Return the wait times of ranks that exit in time; polls, so that other ranks can use the store meanwhile."""
    deadline = Deadline(COLLECT_S)
    found: dict[int, bytes] = {}
    while len(found) < len(ranks) and not deadline.passed():
        for rank in [rank for rank in ranks if rank not in found and store.has(f"{key}/{rank}")]:
            found[rank] = base64.b64decode(store.get(f"{key}/{rank}", 1.0))
        if len(found) < len(ranks):
            deadline.sleep(POLL_S)
    return found

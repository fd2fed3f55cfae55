"""Stragglers: ranks that others waited for, by a collective call or in rank 0's report at shutdown."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import exchange
from dualdist.backends.operation import Stages
from dualdist.collectives.collectives import run_agreed
from dualdist.collectives.group import Group
from dualdist.errors import CollectiveError
from dualdist.liveness.wait_times import SlowRanks, WaitTimes, summarize_waits


def slow_ranks(group: Group) -> SlowRanks:
    """Return the wait times since the last call, and reset them; all ranks of the group must call this."""
    name = group.next_name("slow_ranks")

    def perform(backend: Backend) -> Stages[SlowRanks]:
        counted = group.wait_times or WaitTimes()
        group.wait_times = WaitTimes()
        return summarize_waits(group.ranks, (yield exchange(backend, counted.dumps(), name)))

    found: SlowRanks = run_agreed(group, "slow_ranks", name, {}, perform)
    return found


def report_at_shutdown(world: Group) -> Callable[[], None]:
    """Count waits from now on; return what has rank 0 print them when all ranks shut down, unless one has failed."""
    world.wait_times = WaitTimes()

    def report() -> None:
        if not world.is_usable or world.size == 1:
            return
        with contextlib.suppress(CollectiveError):  # a rank that is gone is reported by others
            found = slow_ranks(world)
            if world.rank == 0:
                print(f"dualdist: {found}", file=sys.stderr, flush=True)

    return report

"""Process sets (groups of ranks), and the state of the Horovod API between hvd.init() and hvd.shutdown()."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualdist import session
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Handle
from dualdist.errors import NotInitializedError, UsageError
from dualdist.hvd.common import HorovodInternalError
from dualdist.hvd.timeline import HorovodTimeline

KEY = "hvd"  # key in a session's extras
DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
WHERE = f'only after hvd.init(process_sets="dynamic"), or where {DYNAMIC}=1 was set before it'


@dataclass(frozen=True)
class CrossRank:
    """The position of a rank: cross ranks count the nodes that have this local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


@dataclass
class HorovodSession:
    """The job of hvd: `base` is the group of the ranks of hvd.init(), `groups` and `sets` go by process_set_id."""

    base: Group
    position: CrossRank
    is_dynamic: bool
    groups: dict[int, Group]
    sets: dict[int, ProcessSet]
    pending: dict[int, Handle[Any]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # the handles', for all threads
    timeline: HorovodTimeline | None = None

    def set_timeline(self, timeline: HorovodTimeline | None) -> None:
        """Complete the timeline before, if any, and show all groups' events in this one."""
        if self.timeline is not None:
            for group in self.groups.values():
                group.observers.remove(self.timeline)
            self.timeline.close()
        self.timeline = timeline
        for group in self.groups.values():
            self.observe(group)

    def observe(self, group: Group) -> None:
        """Show the group's events in the timeline, if there is one."""
        if self.timeline is not None:
            group.observers.append(self.timeline)

    def job_rank(self, rank: int) -> int:
        """Return the job's number of one of the ranks of hvd.init()."""
        return self.base.ranks[rank] if 0 <= rank < self.base.size else rank


def current() -> HorovodSession:
    """Return the open session; raise NotInitializedError, a ValueError as Horovod's, if there is none."""
    found = session.current().extras.get(KEY) if session.is_open() else None
    if found is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    assert isinstance(found, HorovodSession)
    return found


class ProcessSet:
    """A set of ranks, for `process_set=`; every rank passes it to hvd.init() or add_process_set().

    Args:
        ranks_or_comm: ranks, or an mpi4py communicator over them.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        ranks: list[Any] = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if any(not isinstance(rank, int) for rank in ranks):
            raise UsageError(f"ProcessSet({ranks_or_comm!r}): expected ranks, or an mpi4py communicator")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks in the set, or None before it is registered."""
        return None if self.process_set_id is None else group_of(self).size

    def rank(self) -> int | None:
        """Return this process's rank in the set, or None before it is registered; ValueError if it has none."""
        if self.process_set_id is None:
            return None
        group = group_of(self)
        if not group.is_member:
            raise UsageError(f"rank {current().base.rank} is not in the process set of ranks {self.ranks}")
        return group.rank

    def included(self) -> bool | None:
        """Return True if this process is in the set, or None if the set's ranks are not known yet."""
        return None if self.ranks is None else current().base.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set after hvd.init(process_sets="dynamic"); every rank calls this.

    Args:
        process_set: the set, or its ranks.

    Raises:
        ValueError: there is a set of the same ranks, or sets cannot be added after this hvd.init().
    """
    job = current()
    if not job.is_dynamic:
        raise UsageError(f"process sets are added {WHERE}")
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if given.ranks is None:
        raise NotImplementedError("a process set of a communicator is given to hvd.init(); add one by its ranks")
    return register(job, given)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and return True, or False if it is not registered or global; every rank calls this."""
    job = current()
    number = process_set.process_set_id
    if not job.is_dynamic:
        raise UsageError(f"process sets are removed {WHERE}")
    if number is None or number == 0 or number not in job.groups:
        return False
    process_set.process_set_id = None
    del job.sets[number]
    session.remove_group(job.groups.pop(number))
    return True


def find_number(job: HorovodSession, ranks: Sequence[int]) -> int | None:
    """Return the process_set_id of the set of these ranks, or None."""
    return next((number for number, each in job.sets.items() if each.ranks == list(ranks)), None)


def assign_numbers(job: HorovodSession, process_sets: Sequence[ProcessSet]) -> None:
    """Give each set its process_set_id; raise ValueError if there is none, or for a set that is given twice."""
    seen: list[int | None] = [0]
    for process_set in process_sets:
        number = find_number(job, process_set.ranks or ())
        if number is None:
            raise UsageError(f"hvd.init() has been called without {process_set}: add it by hvd.add_process_set()")
        if number in seen:
            process_set.process_set_id = None
            raise UsageError(f"{process_set} is given twice, or is the one of all ranks: leave it out")
        seen.append(number)
        process_set.process_set_id = number
        job.sets[number] = process_set


def register(job: HorovodSession, process_set: ProcessSet) -> ProcessSet:
    """Create the set's group; raise ValueError if there is a set of the same ranks."""
    ranks = process_set.ranks
    assert ranks is not None, "callers have found the ranks"
    if job.base.size != session.current().topology.size:
        raise NotImplementedError(
            "process sets are made in a job of all ranks, not in one that hvd.init(comm=...) made"
        )
    if find_number(job, ranks) is not None:
        raise UsageError(f"there is a process set of the same ranks already: {process_set}")
    number = next(number for number in range(1, len(job.groups) + 2) if number not in job.groups)
    job.groups[number] = session.new_group(ranks)
    job.observe(job.groups[number])
    job.sets[number] = process_set
    process_set.process_set_id = number
    return process_set


def group_of(process_set: ProcessSet) -> Group:
    """Return the group of the set; raise ValueError if it is not registered."""
    number, groups = process_set.process_set_id, current().groups
    if number is None or number not in groups:
        raise UsageError(f"{process_set} is not known: give it to hvd.init() or hvd.add_process_set() on every rank")
    return groups[number]


def member_group(process_set: ProcessSet) -> Group:
    """Return the group of the set; raise HorovodInternalError if this process is not in it."""
    group = group_of(process_set)
    if not group.is_member:
        raise HorovodInternalError(f"rank {current().base.rank} is not in the process set of ranks {process_set.ranks}")
    return group

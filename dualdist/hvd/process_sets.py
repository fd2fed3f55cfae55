"""Process sets: some of the ranks, for the operations that take `process_set`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dualdist import session
from dualdist.collectives.group import Group
from dualdist.errors import UsageError
from dualdist.hvd.exceptions import HorovodInternalError
from dualdist.hvd.face import HorovodSession, current

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
WHERE = f'only after hvd.init(process_sets="dynamic"), or where {DYNAMIC}=1 was set before it'


class ProcessSet:
    """Some of the ranks; known to every rank once it was given to hvd.init() or add_process_set().

    `ranks_or_comm` are ranks, or an mpi4py communicator over them.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if isinstance(ranks_or_comm, Iterable):
            ranks = sorted(ranks_or_comm)
            if any(not isinstance(rank, int) for rank in ranks):
                raise UsageError(f"ProcessSet({ranks!r}): expected ranks, or an mpi4py communicator")
            self.ranks = ranks
        elif hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            raise UsageError(f"ProcessSet({ranks_or_comm!r}): expected ranks, or an mpi4py communicator")

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """How many ranks are in the set; None before it is known."""
        return None if self.process_set_id is None else group_of(self).size

    def rank(self) -> int | None:
        """This process's place in the set; None before it is known. ValueError where it is not in the set."""
        if self.process_set_id is None:
            return None
        group = group_of(self)
        if not group.is_member:
            raise UsageError(f"rank {current().rank} is not in the process set of ranks {self.ranks}")
        return group.rank

    def included(self) -> bool | None:
        """Whether this process is in the set; None where its ranks are not known."""
        return None if self.ranks is None else current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """The set, known to every rank from now on; every rank calls this. hvd.init(process_sets="dynamic") allows it."""
    face = current()
    if not face.is_dynamic:
        raise UsageError(f"process sets are added {WHERE}")
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if given.ranks is None:
        raise NotImplementedError("a process set of a communicator is given to hvd.init(); add one by its ranks")
    return register(face, given)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Whether the set was there, and is no more; every rank calls this. The set of all ranks stays."""
    face = current()
    number = process_set.process_set_id
    if not face.is_dynamic:
        raise UsageError(f"process sets are removed {WHERE}")
    if number is None or number == 0 or number not in face.groups:
        return False
    process_set._invalidate()
    del face.sets[number]
    session.remove_group(face.groups.pop(number))
    return True


def register(face: HorovodSession, process_set: ProcessSet) -> ProcessSet:
    """Make the set known; ValueError where one of the same ranks is known already."""
    ranks = process_set.ranks
    assert ranks is not None, "callers have found the ranks"
    if face.base.size != session.current().topology.size:
        raise NotImplementedError(
            "process sets are made in a job of all ranks, not in one that hvd.init(comm=...) made"
        )
    if ranks == list(range(face.base.size)) or any(known.ranks == ranks for known in face.sets.values()):
        raise UsageError(f"there is a process set of the same ranks already: {process_set}")
    number = next(number for number in range(1, len(face.groups) + 2) if number not in face.groups)
    face.groups[number] = session.new_group(ranks)
    face.observe(face.groups[number])
    face.sets[number] = process_set
    process_set.process_set_id = number
    return process_set


def group_of(process_set: ProcessSet) -> Group:
    """The group that the set stands for; ValueError where it is not known."""
    face = current()
    number = process_set.process_set_id
    if number is None or number not in face.groups:
        raise UsageError(f"{process_set} is not known: give it to hvd.init() or hvd.add_process_set() on every rank")
    return face.groups[number]


def joined_group(process_set: ProcessSet) -> Group:
    """group_of, for an operation; HorovodInternalError where this process is not in the set."""
    group = group_of(process_set)
    if not group.is_member:
        raise HorovodInternalError(f"rank {current().rank} is not in the process set of ranks {process_set.ranks}")
    return group

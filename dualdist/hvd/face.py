"""What the face remembers between hvd.init() and hvd.shutdown(); it lies in dualdist's session."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dualdist import session
from dualdist.collectives.group import Group
from dualdist.collectives.work import Handle
from dualdist.errors import NotInitializedError, UsageError
from dualdist.hvd.exceptions import horovods_errors

if TYPE_CHECKING:
    from dualdist.hvd.process_sets import ProcessSet
    from dualdist.hvd.timeline import HorovodTimeline

KEY = "hvd"


@dataclass(frozen=True)
class CrossRank:
    """Where a rank sits: cross ranks count the nodes that have this local rank."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


@dataclass
class HorovodSession:
    """The job as hvd sees it: `base` has the ranks of hvd.init(), `groups` and `sets` go by process_set_id."""

    base: Group
    seat: CrossRank
    is_dynamic: bool
    groups: dict[int, Group]
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    pending: dict[int, tuple[Handle[Any], Callable[[Any], Any]]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of handles; threads share it
    timeline: HorovodTimeline | None = None

    @property
    def rank(self) -> int:
        return self.base.rank

    def observe(self, group: Group) -> None:
        """Let the timeline, if there is one, show what happens in the group from now on."""
        session.set_observers(group, self.timeline, None if self.timeline is None else self.timeline.moved)

    def job_rank(self, rank: int) -> int:
        """The job's number for one of the ranks of hvd.init()."""
        return self.base.ranks[rank] if 0 <= rank < self.base.size else rank


def current() -> HorovodSession:
    """The face of the open session; a ValueError, as Horovod's, before hvd.init() and after hvd.shutdown()."""
    face = session.current().extras.get(KEY) if session.is_open() else None
    if face is None:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    found: HorovodSession = face
    return found


def started(handle: Handle[Any], result: Callable[[Any], Any] = lambda value: value) -> int:
    """The number by which poll() and synchronize() know the operation."""
    face = current()
    number = next(face.numbers)
    face.pending[number] = handle.begin(), result
    return number


def poll(handle: int) -> bool:
    """Whether synchronize() would return at once; ValueError where there is no such operation, or no more."""
    pending = current().pending
    if handle not in pending:
        raise UsageError(f"handle {handle} is of no operation under way: was it synchronized already?")
    return pending[handle][0].done()


def synchronize(handle: int) -> Any:
    """The operation's result, once it is there; None where there is no such operation, or no more."""
    found = current().pending.pop(handle, None)
    if found is None:
        return None
    with horovods_errors():
        return found[1](found[0].wait())

"""Operations that say which they are when they fail, and which ranks were missing; those that succeed send nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dualdist.backends.base import Backend, Buffer, Epilogue, LazyDescription, ReduceOp, Work
from dualdist.errors import CollectiveError, CollectiveTimeoutError, RankLostError, RendezvousError, UnsupportedError
from dualdist.monitoring.rank_probe import RankProbe
from dualdist.monitoring.timeout_report import STORE_GONE, give_up, lost, silent_ranks
from dualdist.utils.suggest import listed

if TYPE_CHECKING:
    import torch


class Monitor:
    """Lets the errors of operations between these ranks say which operation failed, and who was missing."""

    def __init__(self, roll: RankProbe | None, ranks: Sequence[int]) -> None:
        self.roll = roll  # None in a job of one rank
        self.ranks = ranks
        # Is told "begun" or "done", the kind, the name and the size of what a watched backend moves.
        self.observer: Callable[[str, str, str, int], None] | None = None

    def begun(self, kind: str, name: str, tensor: torch.Tensor) -> Callable[[], None]:
        """The observer knows that a move has begun; calling the result tells it, once, that the move is over."""
        observer = self.observer
        if observer is None:
            return _nothing
        nbytes = tensor.nbytes
        observer("begun", kind, name, nbytes)
        unheard = [observer]
        return lambda: unheard.pop()("done", kind, name, nbytes) if unheard else None

    def over(self, what: object) -> _OperationScope:
        """A block in which this rank is in the operation `what`."""
        return _OperationScope(self, what)


class _OperationScope:
    """Says where this rank is while it lasts, and which operation it was when it fails."""

    def __init__(self, watch: Monitor, what: object) -> None:
        self._watch = watch
        self._what = what
        self._before: tuple[object, float] | None = None

    def __enter__(self) -> None:
        if self._watch.roll is not None:
            self._before = self._watch.roll.enter(self._what)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        roll = self._watch.roll
        try:
            if isinstance(error, (CollectiveError, UnsupportedError)) and not error.names_operation:
                told = type(error)(self._told(error))
                told.names_operation = True
                raise told from error.__cause__
        finally:
            if roll is not None:
                roll.leave(self._before)

    def _told(self, error: BaseException) -> str:
        """The error, and which operation it was of, and which ranks were missing."""
        roll, ranks, what = self._watch.roll, self._watch.ranks, str(self._what)
        if roll is None:
            return f"{what}: {error}"
        if isinstance(error, CollectiveTimeoutError):
            return give_up(roll, ranks, what, str(error))
        if isinstance(error, RankLostError) and not error.ranks:
            gone = lost(roll, ranks)
            return f"{what}: {error}" + (f"; no answer from {listed(gone)}" if gone else "")
        return f"{what}: {error}"


def _nothing() -> None:
    """There is nobody to tell."""


def require_answers(watch: Monitor) -> None:
    """CollectiveTimeoutError unless all ranks still say where they are, wherever that may be."""
    if watch.roll is None:
        return
    try:
        silent = silent_ranks(watch.roll, watch.ranks)
    except (RendezvousError, TimeoutError) as error:
        raise CollectiveTimeoutError(STORE_GONE) from error
    if silent:
        raise CollectiveTimeoutError("some ranks have gone quiet")


class MonitoredWork:
    """Work whose errors say which operation it is, and which tells when it was first found to be over."""

    def __init__(self, work: Work, what: object, watch: Monitor, ended: Callable[[], None]) -> None:
        self._work = work
        self._what = what
        self._watch = watch
        self._ended = ended

    def done(self) -> bool:
        try:
            is_done = self._work.done()
        except CollectiveError:
            with self._watch.over(self._what):
                raise
        if is_done:
            self._ended()
        return is_done

    def wait(self) -> torch.Tensor:
        try:
            with self._watch.over(self._what):
                return self._work.wait()
        finally:
            self._ended()


class _MonitoredBuffer:
    """A buffer whose reductions are watched."""

    def __init__(self, backend: MonitoredBackend, buffer: Buffer) -> None:
        self.values = buffer.values
        self.settles = buffer.settles
        self.rows = buffer.rows
        self.uses_without_rows = buffer.uses_without_rows
        self._backend = backend
        self._buffer = buffer

    def allreduce(self, op: ReduceOp, name: str, settling: Epilogue) -> MonitoredWork:
        return self._backend._watched(
            "allreduce", name, self.values, lambda: self._buffer.allreduce(op, name, settling)
        )


class MonitoredBackend:
    """A backend whose failing operations say which they are, and name the ranks that are missing."""

    def __init__(self, backend: Backend, watch: Monitor) -> None:
        self._backend = backend
        self._watch = watch
        self.name = backend.name
        self.transport = backend.transport
        self.ranks = backend.ranks
        self.rank = backend.rank
        self.size = backend.size
        self.supported_reduce_dtypes = backend.supported_reduce_dtypes
        self.traceable = backend.traceable
        self.done_means_all_started = backend.done_means_all_started

    @property
    def timeout_s(self) -> float:
        return self._backend.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._backend.timeout_s = value

    @property
    def is_open(self) -> bool:
        return self._backend.is_open

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> MonitoredWork:
        return self._watched("allreduce", name, buffer, lambda: self._backend.allreduce_(buffer, op, name))

    def allgather(self, tensor: torch.Tensor, name: str) -> MonitoredWork:
        return self._watched("allgather", name, tensor, lambda: self._backend.allgather(tensor, name))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> MonitoredWork:
        return self._watched("broadcast", name, buffer, lambda: self._backend.broadcast_(buffer, root, name))

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> MonitoredWork:
        return self._watched("alltoall", name, tensor, lambda: self._backend.alltoall(tensor, sent, received, name))

    def reserve(self, nbytes: int, device: torch.device) -> int:
        with self._watch.over(f"reservation of {nbytes} bytes"):
            return self._backend.reserve(nbytes, device)

    def buffer(self, place: int, number: int, count: int, dtype: torch.dtype, device: torch.device) -> Buffer | None:
        buffer = self._backend.buffer(place, number, count, dtype, device)
        return None if buffer is None else _MonitoredBuffer(self, buffer)

    def drop(self, place: int) -> None:
        self._backend.drop(place)

    def channel(self, key: str) -> Backend:
        return MonitoredBackend(self._backend.channel(key), self._watch)

    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        return MonitoredBackend(self._backend.subgroup(ranks, key), Monitor(self._watch.roll, ranks))

    def built_with(self) -> dict[str, int]:
        return self._backend.built_with()

    def close(self) -> None:
        self._backend.close()

    def _watched(self, kind: str, name: str, tensor: torch.Tensor, start: Callable[[], Work]) -> MonitoredWork:
        what = LazyDescription(kind, name, tensor)
        ended = self._watch.begun(kind, name, tensor)
        try:
            with self._watch.over(what):
                return MonitoredWork(start(), what, self._watch, ended)
        except BaseException:
            ended()
            raise

"""An operation on a group of ranks, and the handle by which a program waits for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from dualdist.backends.base import Backend
from dualdist.collectives.compile import disable_compile
from dualdist.collectives.negotiation import CollectiveRequest, RankRequests
from dualdist.monitoring.monitored import Monitor

if TYPE_CHECKING:
    from dualdist.collectives.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class PendingOperation(Generic[T]):
    """What to tell the other ranks, and what to do once they agree, given each rank's own part (None: joined)."""

    offer: CollectiveRequest
    perform: Callable[[Backend, Sequence[Any]], T]
    device: torch.device | None = None  # of the tensors, if there are any

    def streams(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which work goes to the stream that is the current one now, wherever it runs."""
        if self.device is None or self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.current_stream(self.device))


class Handle(Generic[T]):
    """An operation under way; wait() finishes it and returns its result, every time it is called."""

    def __init__(self, group: Group, operation: PendingOperation[T]) -> None:
        self._offer = operation.offer
        self.name = operation.offer.name
        self._group = group
        self._operation: PendingOperation[T] | None = operation
        self._streams = operation.streams()
        self._is_inference = torch.is_inference_mode_enabled()
        self.began = 0.0 if group.wait_times is None else time.monotonic()
        self.waits_since: float | None = None  # before anybody calls wait()
        self._result: T
        self._error: BaseException | None = None
        self._is_done = False

    @property
    def what(self) -> str:
        """In the words of an error."""
        return self._offer.what

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._is_done

    def failed(self) -> bool:
        """Whether wait() would raise at once."""
        return self._error is not None

    @disable_compile
    def begin(self) -> Handle[T]:
        """Let it go on by itself, while the program does something else; returns this handle."""
        if not self._is_done:
            self._group._let_thread_drive()
        return self

    @disable_compile
    def wait(self) -> T:
        """The result; raises CollectiveError where the operation failed."""
        if not self._is_done:
            self._group._carry_on_until(self)
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def offer(self) -> CollectiveRequest:
        return self._offer

    def _perform(self, backend: Backend, own: Sequence[Any], monitor: Monitor) -> None:
        assert self._operation is not None, "an operation is performed once"
        try:
            with monitor.operation(self._offer), self._streams, _inference_mode(self._is_inference):
                result = self._operation.perform(backend, own)
        except Exception as error:  # whoever waits for it shall see it, whatever it is
            self._fail(error)
        else:
            self._result = result
            self._end()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._end()

    @property
    def error(self) -> BaseException | None:
        """Why it failed, if it did."""
        return self._error

    def _end(self) -> None:
        self._operation = None  # and the tensors that it holds
        self._is_done = True


def _inference_mode(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """A block in the mode in which the operation was begun, whichever thread performs it."""
    if torch.is_inference_mode_enabled() == wanted:
        return contextlib.nullcontext()
    return torch.inference_mode(wanted)


def own_parts(rows: Sequence[RankRequests], name: str) -> list[Any]:
    """Each rank's own part of an operation, None where it has joined."""
    offers = [row.offer(name) for row in rows]
    return [None if offer is None else offer.own for offer in offers]

"""Running operations of torch.distributed, and the translation of its errors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from dualdist.backends.base import Receive, peer_error, timeout_error
from dualdist.backends.native.store import first_line
from dualdist.backends.operation import Operation
from dualdist.errors import CollectiveError, UnsupportedError
from dualdist.utils.deadline import Deadline

Options = TypeVar("Options")
T = TypeVar("T")
# Operations wait for as long as whoever advances them: Gloo closes all connections at the end of its own time limit.
UNLIMITED = timedelta(days=7)


class NativeOperation(Operation[torch.Tensor]):
    """An asynchronous operation of torch.distributed.

    On an accelerator it has ended once it is in its stream's queue: who takes the result makes the current stream wait,
    and `watch`, called with an event of that stream, bounds the time.
    """

    def __init__(
        self, work: dist.Work, result: torch.Tensor, watch: Callable[[torch.Event], None] | None = None
    ) -> None:
        self._work = work
        self._result = result
        self._watch = watch
        self._has_ended = watch is not None

    @property
    def result(self) -> torch.Tensor:  # type: ignore[override]
        if self._watch is not None:
            watch, self._watch = self._watch, None
            try:
                self._work.wait()
                watch(torch.accelerator.current_stream(self._result.device).record_event())
            except RuntimeError as error:
                raise translate_error(error) from error
        return self._result

    def advance(self, wait_s: float) -> bool:
        if self._has_ended:
            return True
        if wait_s <= 0 and not self._work.is_completed():
            return False
        try:
            self._work.wait(timedelta(seconds=max(wait_s, 0.001)))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._finish()
        self._has_ended = True
        return True

    def _finish(self) -> None:
        """Raise the error of an operation that has ended, if it has one."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise translate_error(error) from error


class NativePeerOperation(Receive):
    """A send or a receive. Gloo closes all connections if it does not end within `wait_s`."""

    def __init__(self, work: dist.Work, result: torch.Tensor) -> None:
        self._work = work
        self.result = result

    def advance(self, wait_s: float) -> bool:
        if wait_s <= 0:
            return bool(self._work.is_completed())
        try:
            self._work.wait(timedelta(seconds=wait_s))
        except RuntimeError as error:
            raise translate_error(error) from error
        return True

    def source(self) -> int:
        return self._work._source_rank()


def unlimited(options: Options) -> Options:
    options.timeout = UNLIMITED  # type: ignore[attr-defined]
    return options


def finish(operation: Operation[T], deadline: Deadline) -> T:
    """Return the result of an operation, before there is a channel."""
    if not operation.advance(deadline.left_s()):
        raise timeout_error(deadline.timeout_s)
    return operation.result


def translate_error(error: Exception) -> Exception:
    """Return the dualdist exception for one of torch.distributed."""
    text, shown = str(error).lower(), first_line(error)
    if found := peer_error(text, shown):
        return found
    if "invalid scalar type" in text or "unsupported" in text or "not support" in text:
        return UnsupportedError(f"torch.distributed cannot move this ({shown})")
    return CollectiveError(shown)

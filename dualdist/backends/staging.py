"""Tensors of an accelerator that a transport cannot reach go through pinned host memory.

Note [staging]: an operation copies its tensor to pinned memory in a stream of its own, moves it there as a CPU tensor,
and copies the result back. The host asks whether a copy has ended and does something else meanwhile: it waits for no
stream. An operation admits the next one once its own transfer has begun, so that one tensor is copied while another is
transferred, and transfers begin in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import Backend
from dualdist.backends.operation import Operation
from dualdist.errors import CollectiveError
from dualdist.utils import accelerator
from dualdist.utils.deadline import Deadline

POLL_S, LONGEST_POLL_S = 0.00005, 0.001  # the first and the longest pause between two looks at a copy


class ThroughHost(Operation[torch.Tensor]):
    """An operation on a copy of a tensor in pinned host memory, whose result is copied back: Note [staging].

    Args:
        stream: the copies go there.
        given: what is sent.
        begin: begins the transfer of the copy.
        target: takes the result, if it is given.
        ready: when the tensor has its values; by default, when the current stream has done what it has now.
    """

    def __init__(
        self,
        stream: torch.Stream,
        given: torch.Tensor,
        begin: Callable[[torch.Tensor], Operation[torch.Tensor]],
        target: torch.Tensor | None,
        ready: torch.Event | None,
    ) -> None:
        if ready is None:
            stream.wait_stream(torch.accelerator.current_stream(given.device))
        else:
            stream.wait_event(ready)
        for tensor in (given,) if target is None else (given, target):
            tensor.record_stream(stream)
        with accelerator.on_stream(stream):
            copy = torch.empty_like(given, device="cpu", pin_memory=True).copy_(given, non_blocking=True)
        self._stream = stream
        self._device = given.device
        self._target = target
        self._copied = stream.record_event()
        self._begin: Callable[[], Operation[torch.Tensor]] | None = lambda: begin(copy)
        self._transfer: Operation[torch.Tensor] | None = None
        self._arrived: torch.Event | None = None  # recorded when the copy of the result is queued

    @property
    def steps(self) -> int:
        return 0 if self._transfer is None else 1 + self._transfer.steps

    @property
    def admits_next(self) -> bool:  # type: ignore[override]
        return self._transfer is not None and self._transfer.admits_next

    @property
    def failure(self) -> BaseException | None:  # type: ignore[override]
        return None if self._transfer is None else self._transfer.failure

    @property
    def result(self) -> torch.Tensor:  # type: ignore[override]
        """The result, for which the current stream waits."""
        assert self._arrived is not None, "advance() has returned True"
        assert self._target is not None
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(self._arrived)
        self._target.record_stream(current)
        return self._target

    def advance(self, wait_s: float) -> bool:
        if self._arrived is not None:
            return True
        if self._transfer is None:
            if self._is_copied(wait_s):
                self._begin_transfer()
            return False  # so that the next one may begin: Note [staging]
        if not self._transfer.advance(wait_s):
            return False
        found = self._transfer.result
        pinned = found if found.is_pinned() else found.pin_memory()
        with accelerator.on_stream(self._stream):
            if self._target is None:
                self._target = torch.empty_like(pinned, device=self._device)
            self._target.copy_(pinned, non_blocking=True)
        self._arrived = self._stream.record_event()
        return True

    def _is_copied(self, wait_s: float) -> bool:
        """Return True once the tensor is in host memory, after at most about `wait_s` seconds."""
        deadline, pause_s = Deadline(wait_s), POLL_S
        while not self._copied.query():
            if deadline.passed():
                return False
            deadline.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        return True

    def _begin_transfer(self) -> None:
        if self._begin is None:
            raise CollectiveError("it was interrupted as it began")
        begin, self._begin = self._begin, None
        self._transfer = begin()


class Staging:
    """A backend that also takes tensors of an accelerator that `inner` does not take."""

    wait_budget_s = 0.0  # a program queues what follows on the device meanwhile

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self._streams: dict[torch.device, torch.Stream] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def through_host(
        self,
        given: torch.Tensor,
        begin: Callable[[torch.Tensor], Operation[torch.Tensor]],
        target: torch.Tensor | None = None,
        ready: torch.Event | None = None,
    ) -> Operation[torch.Tensor]:
        """Begin an operation on a copy of the tensor in host memory: Note [staging]."""
        stream = self._streams.get(given.device)
        if stream is None:
            stream = self._streams[given.device] = torch.Stream(device=given.device)
        return ThroughHost(stream, given, begin, target, ready)

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Operation[torch.Tensor]:
        given = buffer if source is None else source
        if given.device.type == "cpu":
            return self.inner.allreduce_(buffer, op, name, source)
        return self.through_host(given, lambda host: self.inner.allreduce_(host, op, name), buffer)

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Operation[torch.Tensor]:
        if tensor.device.type == "cpu":
            return self.inner.allgather(tensor, name, output)

        def begin(host: torch.Tensor) -> Operation[torch.Tensor]:
            shape = self.inner.size * host.shape[0], *host.shape[1:]
            return self.inner.allgather(host, name, torch.empty(shape, dtype=host.dtype, device="cpu", pin_memory=True))

        return self.through_host(tensor, begin, output)

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Operation[torch.Tensor]:
        if buffer.device.type == "cpu":
            return self.inner.broadcast_(buffer, root, name)
        return self.through_host(buffer, lambda host: self.inner.broadcast_(host, root, name), buffer)

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
    ) -> Operation[torch.Tensor]:
        if tensor.device.type == "cpu":
            return self.inner.alltoall(tensor, sent, received, name)
        return self.through_host(tensor, lambda host: self.inner.alltoall(host, sent, received, name))

    def duplicate(self, key: str) -> Backend:
        return cast(Backend, Staging(self.inner.duplicate(key)))

    def subgroup(self, ranks: Sequence[int], key: str) -> Backend:
        return cast(Backend, Staging(self.inner.subgroup(ranks, key)))


def with_staging(backend: Backend, device: torch.device) -> Backend:
    """Return the backend, or one that also takes this device's tensors."""
    is_taken = backend.devices is None or device.type in backend.devices
    return backend if is_taken else cast(Backend, Staging(backend))


def without_staging(backend: Backend) -> Backend:
    """Return the backend that moves CPU tensors."""
    return backend.inner if isinstance(backend, Staging) else backend

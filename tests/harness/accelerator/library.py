"""A collective library for the simulated accelerator, as NCCL is for CUDA: torch.distributed's backend "simccl".

Operations wait in a stream of the communicator for what was queued before, and for the other ranks; the host waits for
none. The device runs one at a time, whatever the communicator: begun in another order on two ranks, they wait for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness.accelerator.device import NAME, alias_on_host, enqueue

LIBRARY = "simccl"
POLL_S = 0.0005
device_is_busy = threading.Lock()


class QueuedWork(dist.Work):
    """An operation in a stream."""

    def __init__(self, event: torch.Event) -> None:
        super().__init__()
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait; as with NCCL the host waits if there is a time limit."""
        if timeout is not None:
            self._event.synchronize()
        torch.accelerator.current_stream().wait_event(self._event)
        return True


class Communicator(dist.ProcessGroup):
    """Moves tensors of the simulated accelerator by Gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(LIBRARY, store), rank, size, timeout)
        self._stream = torch.Stream(device=NAME)
        self._is_aborted = threading.Event()

    def getBackendName(self) -> str:
        return LIBRARY

    def abort(self) -> None:
        self._is_aborted.set()

    def shutdown(self) -> None:
        self._is_aborted.set()

    def _queue(self, tensors: Sequence[torch.Tensor], begin: Callable[..., dist.Work]) -> dist.Work:
        if tensors[0].device.type == "cpu":  # torch takes a group of Python for all kinds of devices
            return begin(*tensors)
        self._stream.wait_stream(torch.accelerator.current_stream())
        for tensor in tensors:
            tensor.record_stream(self._stream)
        on_host = [alias_on_host(tensor) for tensor in tensors]

        def run() -> None:
            device_is_busy.acquire()
            try:
                work = None if self._is_aborted.is_set() else begin(*on_host)
                while work is not None and not (work.is_completed() or self._is_aborted.is_set()):
                    time.sleep(POLL_S)
            finally:
                device_is_busy.release()

        with self._stream:
            enqueue(run)
        return QueuedWork(self._stream.record_event())

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        given = dist.AllreduceOptions()
        given.reduceOp, given.timeout = opts.reduceOp, timedelta(days=1)
        return self._queue(tensors, lambda *found: self._gloo.allreduce([*found], given))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        given = dist.BroadcastOptions()
        given.rootRank, given.rootTensor, given.timeout = opts.rootRank, 0, timedelta(days=1)
        return self._queue(tensors, lambda *found: self._gloo.broadcast([*found], given))

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._queue([output, tensor], lambda into, own: self._gloo._allgather_base(into, own))

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, into: list[int], of: list[int], opts: Any = None
    ) -> dist.Work:
        return self._queue(
            [output, tensor],
            lambda found, own: self._gloo.alltoall_base(found, own, into, of, dist.AllToAllOptions()),
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier()


def register() -> None:
    """Make the library known to torch.distributed, for tensors of the simulated accelerator."""
    dist.Backend.register_backend(LIBRARY, Communicator, devices=[NAME])

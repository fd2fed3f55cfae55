"""Calls of MPI on tensors, and the running operations of the MPI backend."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dualdist.backends.base import Receive
from dualdist.backends.operation import Operation
from dualdist.backends.wait_budget import BYTES_PER_S
from dualdist.errors import CollectiveError, DualdistError, RankLostError, UnsupportedError
from dualdist.utils import accelerator
from dualdist.utils.deadline import Deadline

# MPI's names of the dtypes that every MPI reduces, by every operation.
DATATYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.uint16: "UINT16_T",
    torch.int32: "INT32_T",
    torch.uint32: "UINT32_T",
    torch.int64: "INT64_T",
    torch.uint64: "UINT64_T",
}
# The operations whose memory MPI still uses, even if their caller gave up.
Running = set[Operation[torch.Tensor]]
OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}
# A rank waits by polling, then by yielding its core between polls, then by sleeping, for a share of the time
# waited. MPI progresses only when polled, so a rank sleeps only after the time that the bytes take at BYTES_PER_S.
POLLS = 20
BUSY_S = 0.005
PAUSE_S, LONGEST_PAUSE_S = 0.0001, 0.001
PAUSE_SHARE = 0.02  # a pause adds at most this share to the time waited


def pause(waited_s: float, busy_s: float) -> None:
    """Leave the core to others between two polls, after `waited_s` of waiting, of which `busy_s` without sleep."""
    if waited_s < busy_s:
        os.sched_yield()
    else:
        time.sleep(min(LONGEST_PAUSE_S, max(PAUSE_S, PAUSE_SHARE * (waited_s - busy_s))))


class AbandonedError(Exception):
    """The session has failed or ended, and no rank waits for this operation."""


class MpiCalls:
    """The running MPI of this process. Calls are serialised unless it allows several threads."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.is_concurrent = api.Query_thread() == api.THREAD_MULTIPLE
        kind = accelerator.kind() if self.is_concurrent else None
        takes_addresses = kind is not None and accelerator.mpi_takes_addresses(api.__file__)
        self.devices = frozenset(("cpu", str(kind))) if takes_addresses else frozenset(("cpu",))
        self.datatypes = {dtype: getattr(api, name) for dtype, name in DATATYPES.items()}
        self.ops = {op: getattr(api, name) for op, name in OPS.items()}
        self.lock = contextlib.nullcontext() if self.is_concurrent else threading.RLock()

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Serialise MPI calls in the block and translate their errors."""
        try:
            with self.lock:
                yield
        except self.api.Exception as error:
            raise self.translate_error(error) from error

    def elements(self, tensor: torch.Tensor) -> list[Any]:
        """Return mpi4py's buffer for a contiguous tensor of a dtype that MPI has."""
        return [self._memory(tensor), tensor.numel(), self.datatypes[tensor.dtype]]

    def bytes(self, tensor: torch.Tensor) -> list[Any]:
        """Return mpi4py's buffer for a contiguous tensor of any dtype, as bytes."""
        return [self._memory(tensor), tensor.nbytes, self.api.BYTE]

    def blocks(self, tensor: torch.Tensor) -> list[Any]:
        """Return mpi4py's buffer for a contiguous tensor of equal blocks, one per rank, as bytes."""
        return [self._memory(tensor), self.api.BYTE]

    def _memory(self, tensor: torch.Tensor) -> Any:
        return self.api.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def meet(self, comm: Any, is_abandoned: Callable[[], bool]) -> None:
        """Wait for all ranks of the communicator, as a blocking call of MPI would, but asleep.

        Raises:
            AbandonedError: `is_abandoned` returned True; MPI keeps the request of the barrier.
        """
        request, began = comm.Ibarrier(), time.monotonic()
        while not request.Test():
            pause(time.monotonic() - began, BUSY_S)
            if is_abandoned():  # MPI may be finished at any time now
                raise AbandonedError

    def translate_error(self, error: Exception) -> DualdistError:
        """Return the dualdist exception for one of MPI."""
        api, text = self.api, " ".join(str(error).split())
        kind = error.Get_error_class() if isinstance(error, api.Exception) else None
        if kind == getattr(api, "ERR_PROC_FAILED", None):
            return RankLostError(f"another rank ended ({text})")
        if kind in (api.ERR_TYPE, api.ERR_OP, api.ERR_COUNT, api.ERR_UNSUPPORTED_OPERATION):
            return UnsupportedError(f"MPI cannot move this ({text})")
        return CollectiveError(f"MPI failed ({text})")


class MpiRequest(Receive):
    """An operation of one or more nonblocking MPI requests."""

    def __init__(
        self,
        mpi: MpiCalls,
        running: Running,
        requests: list[Any],
        result: torch.Tensor,
        given: torch.Tensor,
        status: Any = None,
    ) -> None:
        self.result = result
        self._mpi = mpi
        self._running = running
        self._requests = requests
        self._busy_s = BUSY_S + (result.nbytes + given.nbytes) / BYTES_PER_S  # how long it polls before it sleeps
        self._given = given  # MPI reads its memory
        self._status = status  # of a receive, for source()
        running.add(self)

    def _has_ended(self) -> bool:
        if not self._requests:
            return True
        api = self._mpi.api
        try:
            with self._mpi.lock:
                if self._status is not None:
                    has_ended = self._requests[0].Test(self._status)
                elif len(self._requests) == 1:
                    has_ended = self._requests[0].Test()
                else:
                    has_ended = api.Request.Testall(self._requests)
        except api.Exception as error:
            raise self._mpi.translate_error(error) from error
        if has_ended:
            self._requests = []
            self._running.discard(self)
        return bool(has_ended)

    def advance(self, wait_s: float) -> bool:
        if self._has_ended():
            return True
        if wait_s <= 0:
            return False
        for _ in range(POLLS):
            if self._has_ended():
                return True
        began = time.monotonic()
        deadline = Deadline(wait_s)
        while not self._has_ended():
            if deadline.passed():
                self._busy_s -= time.monotonic() - began
                return False
            pause(time.monotonic() - began, self._busy_s)
        return True

    def source(self) -> int:
        return int(self._status.Get_source())


class MpiBlockingCall(Operation[torch.Tensor]):
    """An operation that the backend's thread runs by a blocking MPI call."""

    def __init__(self, mpi: MpiCalls, running: Running, call: Callable[[], object], result: torch.Tensor) -> None:
        self.result = result
        self._mpi = mpi
        self._running = running
        self._call = call
        self._error: DualdistError | None = None
        self._has_ended = threading.Event()
        running.add(self)

    def run(self) -> None:
        """Run the call, in the backend's thread."""
        try:
            with accelerator.use(self.result.device):
                self._call()
        except AbandonedError as error:  # MPI still runs it
            self._error = self._mpi.translate_error(error)
            self._has_ended.set()
            return
        except Exception as error:  # raised by advance()
            self._error = self._mpi.translate_error(error)
            self._error.__cause__ = error
        self._running.discard(self)
        self._has_ended.set()

    def advance(self, wait_s: float) -> bool:
        if not self._has_ended.wait(wait_s):
            return False
        if self._error is not None:
            raise self._error
        return True

"""Calls of MPI on tensors, and the running operations of the MPI backend."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from dualdist.backends.base import timeout_error
from dualdist.errors import (
    CLOSED,
    CollectiveError,
    DualdistError,
    NotInitializedError,
    RankLostError,
    UnsupportedError,
)
from dualdist.utils.deadline import Deadline

if TYPE_CHECKING:
    from dualdist.backends.mpi.backend import MpiBackend

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
OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}
# A rank waits by polling, then yielding its core between polls, then sleeping between them. MPI progresses only when
# polled, so a rank sleeps only after the time that the operation's bytes take at BYTES_PER_S.
POLLS = 20
BUSY_S = 0.005
BYTES_PER_S = 500e6
PAUSE_S = 0.0001
CUDA = 0  # MPICH's MPIX_GPU_SUPPORT_CUDA


class MpiCalls:
    """The running MPI of this process. Calls are serialised unless it allows several threads."""

    def __init__(self, api: Any, wait_budget_s: float) -> None:
        self.api = api
        self.wait_budget_s = wait_budget_s
        self.is_concurrent = api.Query_thread() == api.THREAD_MULTIPLE
        self.takes_cuda = self.is_concurrent and torch.cuda.is_available() and takes_cuda(api.__file__)
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

    def translate_error(self, error: Exception) -> DualdistError:
        """Return the dualdist exception for one of MPI."""
        api, text = self.api, " ".join(str(error).split())
        kind = error.Get_error_class() if isinstance(error, api.Exception) else None
        if kind == getattr(api, "ERR_PROC_FAILED", None):
            return RankLostError(f"another rank ended ({text})")
        if kind in (api.ERR_TYPE, api.ERR_OP, api.ERR_COUNT, api.ERR_UNSUPPORTED_OPERATION):
            return UnsupportedError(f"MPI cannot move this ({text})")
        return CollectiveError(f"MPI failed ({text})")


class MpiRequest:
    """An operation of one or more nonblocking MPI requests."""

    def __init__(self, backend: MpiBackend, requests: list[Any], result: torch.Tensor, given: torch.Tensor) -> None:
        self._backend = backend
        self._requests = requests
        self._result = result
        self._given = given
        self._timeout_s = backend.timeout_s
        backend.running.add(self)  # MPI may write to its memory after a timeout
        self._test = requests[0].Test if len(requests) == 1 else lambda: backend.mpi.api.Request.Testall(requests)

    def done(self) -> bool:
        if not self._requests:
            return True
        mpi = self._backend.mpi
        try:
            with mpi.lock:
                is_finished = bool(self._test())
        except mpi.api.Exception as error:
            raise mpi.translate_error(error) from error
        if is_finished:
            self._requests = []
            self._backend.running.discard(self)
        return is_finished

    def wait(self) -> torch.Tensor:
        for _ in range(POLLS):
            if self.done():
                return self._result
        deadline = Deadline(self._timeout_s)
        busy_until = time.monotonic() + BUSY_S + (self._result.nbytes + self._given.nbytes) / BYTES_PER_S
        while not self.done():
            if time.monotonic() < busy_until:
                os.sched_yield()
            elif not self._backend.is_open:
                raise NotInitializedError(CLOSED)
            elif deadline.passed():
                raise timeout_error(self._timeout_s)
            else:
                deadline.sleep(PAUSE_S)
        return self._result


class MpiReceive(MpiRequest):
    """A receive from one rank, or from any."""

    def __init__(self, backend: MpiBackend, request: Any, buffer: torch.Tensor) -> None:
        super().__init__(backend, [request], buffer, buffer)
        self._status = backend.mpi.api.Status()
        self._test = lambda: request.Test(self._status)

    def source(self) -> int:
        """See ReceiveWork."""
        return int(self._status.Get_source())


class MpiBlockingCall:
    """An operation that the backend's thread runs by a blocking MPI call."""

    def __init__(self, backend: MpiBackend, call: Callable[[], object], result: torch.Tensor) -> None:
        self._backend = backend
        self._call = call
        self._result = result
        self._timeout_s = backend.timeout_s
        self._error: DualdistError | None = None
        self._running = threading.Lock()
        self._running.acquire()
        backend.running.add(self)

    def run(self) -> None:
        """Run the call, in the backend's thread."""
        try:
            with torch.cuda.device_of(self._result):
                self._call()
        except Exception as error:  # re-raised by wait()
            self._error = self._backend.mpi.translate_error(error)
            self._error.__cause__ = error
        self._backend.running.discard(self)
        self._running.release()

    def wait_within(self, seconds: float) -> bool:
        """Return True once the call has returned, False after `seconds`."""
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()
        return True

    def done(self) -> bool:
        return not self._running.locked()

    def wait(self) -> torch.Tensor:
        if not self.wait_within(self._timeout_s):
            raise timeout_error(self._timeout_s)
        if self._error is not None:
            raise self._error
        return self._result


def takes_cuda(library: str) -> bool:
    """Return True if the MPI that `library` is linked to accepts addresses of GPU memory."""
    symbols = ctypes.CDLL(library)
    if hasattr(symbols, "MPIX_Query_cuda_support"):  # Open MPI, and MPICH since version 4
        return bool(symbols.MPIX_Query_cuda_support())
    if hasattr(symbols, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        failed = symbols.MPIX_GPU_query_support(CUDA, ctypes.byref(answer))
        return not failed and bool(answer.value)
    return False

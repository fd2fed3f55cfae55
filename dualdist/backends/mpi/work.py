"""MPI as a backend sees it: how tensors are handed over, and how operations under way are waited for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from dualdist.backends.base import Work
from dualdist.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    DualdistError,
    NotInitializedError,
    RankLostError,
    UnsupportedError,
)
from dualdist.utils.deadline import Deadline

# MPI's names of the dtypes that every MPI reduces by every operation.
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
CLOSED = "this group has been closed: by dd.shutdown(), or by dd.remove_group()"
# How a rank waits: it asks, then lets others have the core in between, then sleeps. MPI moves on only when it is asked:
# nobody sleeps while the operation's bytes may still be moving, if at no more than this rate.
POLLS = 20
BUSY_S = 0.005
BYTES_PER_S = 500e6
PAUSE_S = 0.0001
CUDA = 0  # MPICH's MPIX_GPU_SUPPORT_CUDA


class MpiCalls:
    """MPI as it runs in this process. Calls are kept apart where it was not built to take several at once."""

    def __init__(self, api: Any, patience_s: float) -> None:
        self.api = api
        self.patience_s = patience_s
        self.is_concurrent = api.Query_thread() == api.THREAD_MULTIPLE
        self.takes_cuda = self.is_concurrent and torch.cuda.is_available() and takes_cuda(api.__file__)
        self.datatypes = {dtype: getattr(api, name) for dtype, name in DATATYPES.items()}
        self.ops = {op: getattr(api, name) for op, name in OPS.items()}
        self._lock = contextlib.nullcontext() if self.is_concurrent else threading.RLock()

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """In the block MPI is called, whose errors become ours."""
        try:
            with self._lock:
                yield
        except self.api.Exception as error:
            raise self.translated(error) from error

    def elements(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor whose dtype MPI knows, as mpi4py takes it."""
        return [self._memory(tensor), tensor.numel(), self.datatypes[tensor.dtype]]

    def bytes(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor of any dtype, as mpi4py takes it."""
        return [self._memory(tensor), tensor.nbytes, self.api.BYTE]

    def blocks(self, tensor: torch.Tensor) -> list[Any]:
        """A contiguous tensor of any dtype, of which every rank has an equal part."""
        return [self._memory(tensor), self.api.BYTE]

    def _memory(self, tensor: torch.Tensor) -> Any:
        return self.api.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def translated(self, error: Exception) -> DualdistError:
        """Our error for one that MPI raised."""
        api, text = self.api, " ".join(str(error).split())
        kind = error.Get_error_class() if isinstance(error, api.Exception) else None
        if kind == getattr(api, "ERR_PROC_FAILED", None):
            return RankLostError(f"another rank ended ({text})")
        if kind in (api.ERR_TYPE, api.ERR_OP, api.ERR_COUNT, api.ERR_UNSUPPORTED_OPERATION):
            return UnsupportedError(f"MPI cannot move this ({text})")
        return CollectiveError(f"MPI failed ({text})")


class MpiChannel(Protocol):
    """What operations need to know of the line that they travel on."""

    mpi: MpiCalls
    timeout_s: float
    is_open: bool
    under_way: set[Any]  # kept until MPI is done with their memory, whatever became of whoever waited


class MpiRequest:
    """Operations that were begun without blocking, and are over when MPI says so."""

    def __init__(self, line: MpiChannel, requests: list[Any], result: torch.Tensor, given: torch.Tensor) -> None:
        self._line = line
        self._requests = requests
        self._result = result
        self._given = given
        self._timeout_s = line.timeout_s
        line.under_way.add(self)  # MPI may write to this memory even after the program has given up waiting
        self._test = requests[0].Test if len(requests) == 1 else lambda: line.mpi.api.Request.Testall(requests)

    def done(self) -> bool:
        if not self._requests:
            return True
        if self._line.mpi.is_concurrent:
            is_over = self._asked()
        else:
            with self._line.mpi.calls():
                is_over = self._asked()
        if is_over:
            self._requests = []
            self._line.under_way.discard(self)
        return is_over

    def _asked(self) -> bool:
        try:
            return bool(self._test())
        except self._line.mpi.api.Exception as error:
            raise self._line.mpi.translated(error) from error

    def wait(self) -> torch.Tensor:
        for _ in range(POLLS):
            if self.done():
                return self._result
        deadline = Deadline(self._timeout_s)
        busy_until = time.monotonic() + BUSY_S + (self._result.nbytes + self._given.nbytes) / BYTES_PER_S
        while not self.done():
            if time.monotonic() < busy_until:
                os.sched_yield()
            elif not self._line.is_open:
                raise NotInitializedError(CLOSED)
            elif deadline.passed():
                raise timeout_error(self._timeout_s)
            else:
                deadline.sleep(PAUSE_S)
        return self._result


class MpiBlockingCall:
    """An operation that a line's thread makes by a call that blocks."""

    def __init__(self, line: MpiChannel, call: Callable[[], object], result: torch.Tensor) -> None:
        self._line = line
        self._call = call
        self._result = result
        self._timeout_s = line.timeout_s
        self._error: DualdistError | None = None
        self._is_under_way = threading.Lock()
        self._is_under_way.acquire()
        line.under_way.add(self)

    def make(self) -> None:
        """Make the call; the thread does this."""
        try:
            with torch.cuda.device_of(self._result):
                self._call()
        except Exception as error:  # whatever it is, whoever waits shall see it
            self._error = self._line.mpi.translated(error)
            self._error.__cause__ = error
        self._line.under_way.discard(self)
        self._is_under_way.release()

    def is_over_within(self, seconds: float) -> bool:
        """Whether the call returns in this time."""
        if not self._is_under_way.acquire(timeout=seconds):
            return False
        self._is_under_way.release()
        return True

    def done(self) -> bool:
        return not self._is_under_way.locked()

    def wait(self) -> torch.Tensor:
        if not self.is_over_within(self._timeout_s):
            raise timeout_error(self._timeout_s)
        if self._error is not None:
            raise self._error
        return self._result


class HostStagedWork:
    """Work on a copy in the host's memory; the result goes back to the GPU."""

    def __init__(self, work: Work, target: torch.Tensor, *, in_place: bool) -> None:
        self._work = work
        self._target = target
        self._in_place = in_place
        self._is_back = False

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> torch.Tensor:
        if not self._is_back:
            result = self._work.wait()
            if not self._in_place:
                self._target = self._target.new_empty(result.shape)
            self._target.copy_(result, non_blocking=True)
            self._is_back = True
        return self._target


def timeout_error(timeout_s: float) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s")


def takes_cuda(library: str) -> bool:
    """Whether the MPI that this library is linked to says that it takes addresses in a GPU's memory."""
    symbols = ctypes.CDLL(library)
    if hasattr(symbols, "MPIX_Query_cuda_support"):  # Open MPI, and MPICH since version 4
        return bool(symbols.MPIX_Query_cuda_support())
    if hasattr(symbols, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        failed = symbols.MPIX_GPU_query_support(CUDA, ctypes.byref(answer))
        return not failed and bool(answer.value)
    return False

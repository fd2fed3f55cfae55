"""Operations and process sets of Horovod as a backend."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Literal

import torch

from dualdist.backends.base import PrivateBuffers, ReduceOp
from dualdist.errors import (
    CLOSED,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    DualdistError,
    MismatchError,
    NotInitializedError,
    RankLostError,
    UnsupportedError,
)
from dualdist.horovod_build.record import read_record
from dualdist.topology import RankLocation
from dualdist.utils.deadline import Deadline, call_within
from dualdist.utils.horovod_names import real_horovod

Controller = Literal["gloo", "mpi"]
DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
Variables = dict[str, "str | None"]  # None: unset

# Open MPI without its own mpirun is a job of one rank, which aborts if a relocated installation does not find the
# daemon. With this it starts, and the session detects the wrong size under another MPI's mpirun.
SINGLETON_VARIABLES = {"OMPI_MCA_ess_singleton_isolated": "1"}


def slot_variables(locations: Sequence[RankLocation]) -> list[Variables]:
    """Return Horovod's variables of every rank. Its cross rank counts the nodes that have the same local rank."""
    local_sizes = Counter(location.node_rank for location in locations)
    columns: dict[int, list[int]] = defaultdict(list)
    for location in sorted(locations, key=lambda location: location.node_rank):
        columns[location.local_rank].append(location.node_rank)
    cross_ranks = {(node, local): index for local, nodes in columns.items() for index, node in enumerate(nodes)}
    return [
        {
            "HOROVOD_HOSTNAME": f"node{location.node_rank}",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(len(locations)),
            "HOROVOD_LOCAL_RANK": str(location.local_rank),
            "HOROVOD_LOCAL_SIZE": str(local_sizes[location.node_rank]),
            "HOROVOD_CROSS_RANK": str(cross_ranks[location.node_rank, location.local_rank]),
            "HOROVOD_CROSS_SIZE": str(len(columns[location.local_rank])),
        }
        for rank, location in enumerate(locations)
    ]


def engine_variables(controller: Controller, timeout_s: float, *, dynamic_sets: bool) -> Variables:
    """Return variables that set Horovod's controller and timeouts.

    Horovod warns of a stalled rank before our wait ends. Its own shutdown of stalled jobs stays off: our timeout names
    the ranks and accounts for joined ones. With `dynamic_sets` the engine adds process sets while it runs.
    """
    return {
        "HOROVOD_CONTROLLER": controller,
        "HOROVOD_CPU_OPERATIONS": controller,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": _seconds(timeout_s),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": _seconds(min(60, timeout_s / 2)),
        **({DYNAMIC_SETS: "1"} if dynamic_sets else {}),
    }


def _seconds(value: float) -> str:
    return str(max(1, round(value)))


INSTALL = "dualdist install-horovod"
# In lower-case errors of Horovod and its transports.
PEER_LOST = ("shut down", "connection closed", "connection reset", "broken pipe", "connection refused")
TIMED_OUT = ("timed out", "timeout")
MISMATCH = ("mismatched",)
# Horovod reduces no integers below 32 bits and no bfloat16.
REDUCE_DTYPES = frozenset((torch.float16, torch.float32, torch.float64, torch.int32, torch.int64))
# Seconds between polls of a handle; Horovod's own wait polls once a millisecond.
POLL_S = 0.0001


@real_horovod()
def import_horovod() -> ModuleType:
    """Import horovod.torch; raise BackendUnavailableError if it is missing or built for another torch."""
    if importlib.util.find_spec("horovod") is None:
        raise BackendUnavailableError(f"Horovod is not installed: run `{INSTALL}`, or use --backend native")
    record = read_record()
    if record is not None and not record.fits(torch.__version__):
        raise BackendUnavailableError(
            f"this Horovod was built for torch {record.torch}, but torch {torch.__version__} is installed: "
            f"run `{INSTALL} --force` to build it again, or use --backend native"
        )
    try:
        return importlib.import_module("horovod.torch")
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailableError(
            f"Horovod is installed but does not load ({error}): run `{INSTALL} --force`, or use --backend native"
        ) from error


@real_horovod()
def is_built_with_mpi() -> bool:
    """Return True if a Horovod with MPI is installed."""
    if importlib.util.find_spec("horovod") is None:
        return False
    record = read_record()
    return bool(import_horovod().mpi_built()) if record is None or record.mpi is None else record.mpi


class HorovodWork:
    """An asynchronous operation of Horovod."""

    def __init__(self, hvd: ModuleType, handle: int, timeout_s: float) -> None:
        self._hvd = hvd
        self._handle = handle
        self._timeout_s = timeout_s
        self._result: torch.Tensor | None = None

    def done(self) -> bool:
        return self._result is not None or self._is_finished()

    def wait(self) -> torch.Tensor:
        if self._result is None:
            deadline = Deadline(self._timeout_s)
            while not self._is_finished():
                if deadline.passed():
                    raise CollectiveTimeoutError(f"not all ranks arrived within {self._timeout_s:g} s")
                time.sleep(POLL_S)
            try:
                result = self._hvd.synchronize(self._handle)
            except RuntimeError as error:
                raise translate_error(error, self._timeout_s) from error
            self._result = result[0] if isinstance(result, tuple) else result  # of an alltoall with splits
        return self._result

    def _is_finished(self) -> bool:
        try:
            return bool(self._hvd.poll(self._handle))
        except ValueError as error:  # a shutdown drops all handles
            raise CollectiveError("Horovod was shut down before all ranks were ready") from error


class ProcessSets:
    """Reference-counted process sets of Horovod, which allows one for the same ranks.

    `engine_environment` sets the variables that the engine was started with: it reads them for every new set.
    """

    def __init__(self, hvd: ModuleType, engine_environment: Callable[[], AbstractContextManager[None]]) -> None:
        self._hvd = hvd
        self._engine_environment = engine_environment
        self._sets: dict[tuple[int, ...], Any] = {}
        self._users: Counter[tuple[int, ...]] = Counter()
        self._is_alone = False  # another rank did not answer

    def acquire(self, ranks: tuple[int, ...]) -> Any:
        """Return the process set of these ranks; every rank of the job calls this."""
        if ranks not in self._sets:
            is_global = len(ranks) == int(self._hvd.size())
            self._sets[ranks] = self._hvd.global_process_set if is_global else self._add(ranks)
        self._users[ranks] += 1
        return self._sets[ranks]

    def _add(self, ranks: tuple[int, ...]) -> Any:
        try:
            with self._engine_environment():
                return self._hvd.add_process_set(list(ranks))
        except ValueError as error:
            raise UnsupportedError(
                f"this Horovod adds no group while running ({error}): `{INSTALL} --force` builds one that can, or set "
                f"{DYNAMIC_SETS}=1 on every rank, with which a rank that stops can hold up the others"
            ) from error

    def release(self, ranks: tuple[int, ...], timeout_s: float) -> None:
        """Remove the process set after its last user; every rank of the job must call this."""
        self._users[ranks] -= 1
        if self._users[ranks] or self._is_alone:
            return
        process_set = self._sets.pop(ranks)

        def late() -> DualdistError:
            self._is_alone = True
            return RankLostError(
                f"Horovod could not end the group of ranks {list(ranks)} within {timeout_s:g} s: another rank does not "
                "answer"
            )

        call_within(timeout_s, lambda: self._hvd.remove_process_set(process_set), late)


class HorovodBackend(PrivateBuffers):
    """Moves tensors through Horovod's engine, between the ranks of a process set; close() calls `leave`."""

    name = "horovod"
    supported_reduce_dtypes = REDUCE_DTYPES
    traceable = False
    done_means_all_started = True

    def __init__(
        self,
        hvd: ModuleType,
        transport: str,
        ranks: Sequence[int],
        process_set: Any,
        sets: ProcessSets,
        timeout_s: float,
        leave: Callable[[], None],
    ) -> None:
        self.transport = transport
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(int(hvd.rank())) if int(hvd.rank()) in self.ranks else -1
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self.is_open = True
        self._hvd = hvd
        self._set = process_set
        self._sets = sets
        self._leave = leave
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> HorovodWork:
        return self._start(
            lambda: self._hvd.allreduce_async_(buffer, name=name, op=self._ops[op], process_set=self._set)
        )

    def allgather(self, tensor: torch.Tensor, name: str) -> HorovodWork:
        return self._start(lambda: self._hvd.allgather_async(tensor, name=name, process_set=self._set))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> HorovodWork:
        return self._start(
            lambda: self._hvd.broadcast_async_(buffer, self.ranks[root], name=name, process_set=self._set)
        )

    def alltoall(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str) -> HorovodWork:
        return self._start(
            lambda: self._hvd.alltoall_async(tensor, splits=list(sent), name=name, process_set=self._set)
        )

    def duplicate(self, key: str) -> HorovodBackend:
        return self  # Horovod matches operations by name

    def subgroup(self, ranks: Sequence[int], key: str) -> HorovodBackend:
        members = tuple(ranks)
        process_set = self._sets.acquire(members)

        timeout_s = self.timeout_s

        def leave() -> None:
            self._sets.release(members, timeout_s)

        return HorovodBackend(self._hvd, self.transport, members, process_set, self._sets, timeout_s, leave)

    def built_with(self) -> dict[str, int]:
        hvd = self._hvd
        return {"gloo": int(hvd.gloo_built()), "mpi": int(hvd.mpi_built()), "nccl": int(hvd.nccl_built())}

    def close(self) -> None:
        self.is_open = False
        self._leave()

    def _start(self, start: Callable[[], int]) -> HorovodWork:
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        try:
            return HorovodWork(self._hvd, start(), self.timeout_s)
        except (RuntimeError, ValueError) as error:
            raise translate_error(error, self.timeout_s) from error


def translate_error(error: Exception, timeout_s: float) -> Exception:
    """Return the dualdist exception for one of Horovod."""
    text = " ".join(str(error).split()).split(". ")[0]
    lowered = text.lower()
    if any(word in lowered for word in TIMED_OUT):
        return CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s")
    if any(word in lowered for word in PEER_LOST):
        return RankLostError(f"another rank ended or its connection broke ({text})")
    if any(word in lowered for word in MISMATCH):
        return MismatchError(text)
    if isinstance(error, ValueError):
        return UnsupportedError(f"Horovod cannot move this ({text})")
    return CollectiveError(text)

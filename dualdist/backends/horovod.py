"""The backend over Horovod, whose own controller runs on MPI or on Gloo."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from dualdist import network
from dualdist.backends.base import ReduceOp, Store
from dualdist.backends.buffers import PlainBuffers
from dualdist.backends.horovod_settings import ALONE, DYNAMIC_SETS, Controller, Settings, settings_for, slots_of
from dualdist.deadline import Deadline, call_within, stop_at_exit
from dualdist.errors import (
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    DualdistError,
    MismatchError,
    NotInitializedError,
    RankLostError,
    RendezvousError,
    UnsupportedError,
)
from dualdist.horovod_build.record import read_record
from dualdist.horovod_names import real_horovod
from dualdist.network import Invitation
from dualdist.placement import Place
from dualdist.topology import Topology
from dualdist.variables import variables_set

INSTALL = "dualdist install-horovod"
GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
# What Horovod and its transports write, in lower case.
GONE = ("shut down", "connection closed", "connection reset", "broken pipe", "connection refused")
LATE = ("timed out", "timeout")
MISMATCH = ("mismatched",)
SETS_PATCHED = "process_set.cc"  # in the record of a Horovod that dualdist built
# Horovod reduces no integers below 32 bits and no bfloat16.
REDUCIBLE = frozenset((torch.float16, torch.float32, torch.float64, torch.int32, torch.int64))
# Seconds between looks at a handle: Horovod's own wait looks once a millisecond.
POLL_S = 0.0001


@real_horovod()
def load() -> ModuleType:
    """`horovod.torch`; BackendUnavailableError where it is missing, or built for another torch."""
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
    """Whether a Horovod with MPI is installed; False where none is."""
    if importlib.util.find_spec("horovod") is None:
        return False
    record = read_record()
    return bool(load().mpi_built()) if record is None or record.mpi is None else record.mpi


def _makes_sets_safely() -> bool:
    """Whether adding process sets while the engine runs holds up nobody: in Horovod as released, the engine keeps its
    table of them locked while it asks the other ranks, and beginning any operation waits for that lock.
    """
    record = read_record()
    return record is not None and any(SETS_PATCHED in patch for patch in record.patches or ())


class HorovodWork:
    """One asynchronous operation of Horovod."""

    def __init__(self, hvd: ModuleType, handle: int, timeout_s: float) -> None:
        self._hvd = hvd
        self._handle = handle
        self._timeout_s = timeout_s
        self._result: torch.Tensor | None = None

    def done(self) -> bool:
        return self._result is not None or self._is_over()

    def wait(self) -> torch.Tensor:
        if self._result is None:
            deadline = Deadline(self._timeout_s)
            while not self._is_over():
                if deadline.passed():
                    raise CollectiveTimeoutError(f"not all ranks arrived within {self._timeout_s:g} s")
                time.sleep(POLL_S)
            try:
                result = self._hvd.synchronize(self._handle)
            except RuntimeError as error:
                raise translated(error, self._timeout_s) from error
            self._result = result[0] if isinstance(result, tuple) else result  # alltoall adds what it received
        return self._result

    def _is_over(self) -> bool:
        try:
            return bool(self._hvd.poll(self._handle))
        except ValueError as error:  # a shutdown forgets all handles
            raise CollectiveError("Horovod was shut down before all ranks were ready") from error


class ProcessSets:
    """Horovod's process sets by their ranks: it has one for the same ranks only, and we may be asked for several.

    `as_started` sets the variables with which the engine was started: it reads them again for every new set.
    """

    def __init__(self, hvd: ModuleType, as_started: Callable[[], AbstractContextManager[None]]) -> None:
        self._hvd = hvd
        self._as_started = as_started
        self._sets: dict[tuple[int, ...], Any] = {}
        self._users: Counter[tuple[int, ...]] = Counter()

    def take(self, ranks: tuple[int, ...]) -> Any:
        """The set of these ranks; every rank of the job calls this."""
        self._users[ranks] += 1
        if ranks not in self._sets:
            everybody = len(ranks) == int(self._hvd.size())
            self._sets[ranks] = self._hvd.global_process_set if everybody else self._add(ranks)
        return self._sets[ranks]

    def _add(self, ranks: tuple[int, ...]) -> Any:
        try:
            with self._as_started():
                return self._hvd.add_process_set(list(ranks))
        except ValueError as error:
            raise UnsupportedError(
                f"this Horovod adds no group while it runs ({error}): `{INSTALL} --force` builds one that does, or set "
                f"{DYNAMIC_SETS}=1 on every rank, with which a rank that stops can hold up the others"
            ) from error

    def give_back(self, ranks: tuple[int, ...]) -> None:
        """One user less; every rank of the job calls this."""
        self._users[ranks] -= 1
        if self._users[ranks] == 0:
            self._hvd.remove_process_set(self._sets.pop(ranks))


class HorovodBackend(PlainBuffers):
    """Moves tensors through Horovod's engine, between the ranks of a process set; close() ends it by `leave`."""

    name = "horovod"
    reducible = REDUCIBLE
    traceable = False

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

    def channel(self, key: str) -> HorovodBackend:
        return self  # Horovod tells operations apart by their names

    def subgroup(self, ranks: Sequence[int], key: str) -> HorovodBackend:
        members = tuple(ranks)
        process_set = self._sets.take(members)

        def leave() -> None:
            self._sets.give_back(members)

        return HorovodBackend(self._hvd, self.transport, members, process_set, self._sets, self.timeout_s, leave)

    def built_with(self) -> dict[str, int]:
        hvd = self._hvd
        return {"gloo": int(hvd.gloo_built()), "mpi": int(hvd.mpi_built()), "nccl": int(hvd.nccl_built())}

    def close(self) -> None:
        self.is_open = False
        self._leave()

    def _start(self, start: Callable[[], int]) -> HorovodWork:
        if not self.is_open:
            raise NotInitializedError("this group has been closed: by dd.shutdown(), or by dd.remove_group()")
        try:
            return HorovodWork(self._hvd, start(), self.timeout_s)
        except (RuntimeError, ValueError) as error:
            raise translated(error, self.timeout_s) from error


def _world(
    hvd: ModuleType,
    transport: str,
    timeout_s: float,
    leave: Callable[[], None],
    as_started: Callable[[], AbstractContextManager[None]],
) -> HorovodBackend:
    """The backend over all ranks of a running engine."""
    sets = ProcessSets(hvd, as_started)
    return HorovodBackend(hvd, transport, range(int(hvd.size())), hvd.global_process_set, sets, timeout_s, leave)


def start_on_mpi(
    topology: Topology, environ: MutableMapping[str, str], device: torch.device, timeout_s: float
) -> HorovodBackend:
    """Start Horovod on the MPI that the launcher started, or on an MPI of one rank."""
    hvd = load()
    if not hvd.mpi_built():
        raise BackendUnavailableError(
            f"this Horovod was built without MPI: run `{INSTALL} --force` where mpicxx is on PATH, or set "
            "DUALDIST_TRANSPORT=gloo"
        )
    if not hvd.is_initialized():
        with variables_set(environ, {**settings_for("mpi", timeout_s, makes_sets=_makes_sets_safely()), **ALONE}):
            _init(hvd, topology, timeout_s)
    # Horovod's shutdown finishes MPI, which cannot start again: the engine stays for a next session, and ends with the
    # process.
    return _world(hvd, _transport(hvd, "mpi", device), timeout_s, _nothing, nullcontext)


def start_on_gloo(
    topology: Topology,
    places: Sequence[Place],
    store: Store | None,
    key: str,
    interface: str | None,
    environ: MutableMapping[str, str],
    device: torch.device,
    timeout_s: float,
) -> HorovodBackend:
    """Start Horovod on Gloo, under any launcher: rank 0 serves Horovod's rendezvous and says so in our store.

    A new server for every start, also where horovodrun runs one: Horovod's server forgets how many ranks have left each
    scope whenever one scope is complete (RendezvousHandler.do_DELETE clears them all), so that a second init in the
    same processes can lose its keys.
    """
    hvd = load()
    if not hvd.gloo_built():
        raise BackendUnavailableError(f"this Horovod was built without Gloo: run `{INSTALL} --force`")
    if hvd.is_initialized():
        raise UnsupportedError(
            "Horovod runs over MPI in this process already and cannot change to Gloo: start a new job with "
            "DUALDIST_TRANSPORT=gloo"
        )
    deadline = Deadline(timeout_s)
    slots = slots_of(places)
    settings = {**settings_for("gloo", timeout_s, makes_sets=_makes_sets_safely()), **slots[topology.rank]}
    stop_server: Callable[[], None] = _nothing
    if store is None:
        settings["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = None  # unset, Horovod makes a world of one
    else:
        address, port, stop_server = _serve_or_find(topology, slots, store, key, environ, deadline)
        settings["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
        settings["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        settings[GLOO_INTERFACE] = environ.get(GLOO_INTERFACE) or interface or "lo"
    try:
        with variables_set(environ, settings):
            _init(hvd, topology, deadline.left_s())
    except BaseException:
        stop_server()
        raise

    def leave() -> None:
        try:
            _shut_down(hvd, timeout_s)
        finally:
            stop_server()

    return _world(hvd, _transport(hvd, "gloo", device), timeout_s, leave, lambda: variables_set(environ, settings))


def _nothing() -> None:
    """What there is to stop where nothing was started."""


def _serve_or_find(
    topology: Topology,
    slots: Sequence[Settings],
    store: Store,
    key: str,
    environ: MutableMapping[str, str],
    deadline: Deadline,
) -> tuple[str, int, Callable[[], None]]:
    """Address and port of Horovod's rendezvous, and what stops it: served by rank 0, found by the others."""
    host = network.host_identity(environ)
    if topology.rank == 0:
        port, stop = _serve(slots)
        store.set(f"{key}/rendezvous", Invitation.of(host, port, one_node=topology.nodes == 1).dumps())
        return (
            (network.own_addresses() or [network.LOOPBACK])[0] if topology.nodes > 1 else network.LOOPBACK,
            port,
            stop,
        )
    try:
        invitation = Invitation.loads(store.get(f"{key}/rendezvous", deadline.left_s()))
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {topology.rank} waited {deadline.timeout_s:g} s for rank 0 to serve Horovod's rendezvous: "
            "see what rank 0 printed last"
        ) from error
    return invitation.answering_address(host, deadline), invitation.port, _nothing


@real_horovod()
def _serve(slots: Sequence[Settings]) -> tuple[int, Callable[[], None]]:
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = int(server.start())
    server._listen_thread.name = "dualdist-rendezvous"  # no thread of the program's
    server.init(
        [
            SlotInfo(
                hostname=slot["HOROVOD_HOSTNAME"],
                **{
                    field: int(slot[f"HOROVOD_{field.upper()}"] or 0)
                    for field in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
                },
            )
            for slot in slots
        ]
    )

    def stop() -> None:
        server.stop()
        server._httpd.server_close()  # stop() leaves the socket open

    return port, stop


def _init(hvd: ModuleType, topology: Topology, timeout_s: float) -> None:
    def late() -> DualdistError:
        return RendezvousError(
            f"rank {topology.rank} waited {timeout_s:g} s in hvd.init() for all {topology.size} ranks: "
            "did one of them end, or never call dd.init()?"
        )

    try:
        call_within(timeout_s, hvd.init, late)
        atexit.register(stop_at_exit, hvd.shutdown)
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"Horovod could not connect rank {topology.rank} to the others ({error}); its own messages stand above. "
            f"If the hosts have several networks, name the one they share in {GLOO_INTERFACE}"
        ) from error


def _shut_down(hvd: ModuleType, timeout_s: float) -> None:
    """Stop the engine, which asks the other ranks' engines to stop too, but not their programs."""

    def late() -> DualdistError:
        return RankLostError(f"Horovod could not shut down within {timeout_s:g} s: another rank does not answer")

    call_within(timeout_s, hvd.shutdown, late)


def _transport(hvd: ModuleType, controller: Controller, device: torch.device) -> str:
    return "nccl" if device.type == "cuda" and hvd.nccl_built() else controller


def translated(error: Exception, timeout_s: float) -> Exception:
    """Our error for one that Horovod raised."""
    text = " ".join(str(error).split()).split(". ")[0]
    lowered = text.lower()
    if any(word in lowered for word in LATE):
        return CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s ({text})")
    if any(word in lowered for word in GONE):
        return RankLostError(f"another rank ended or its connection broke ({text})")
    if any(word in lowered for word in MISMATCH):
        return MismatchError(text)
    if isinstance(error, ValueError):
        return UnsupportedError(f"Horovod cannot move this ({text})")
    return CollectiveError(text)

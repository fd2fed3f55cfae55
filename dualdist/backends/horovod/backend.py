"""Backend over Horovod's engine: its start on MPI or on Gloo under any launcher, its operations and process sets."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import importlib
import importlib.util
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import Backend, InitContext, Store, filled, peer_error
from dualdist.backends.horovod.driver import INTERFACE
from dualdist.backends.mpi import world as mpi_world
from dualdist.backends.operation import Converted, Operation
from dualdist.environments.horovodrun import ELASTIC, STORE_ADDRESS, STORE_PORT
from dualdist.errors import (
    CLOSED,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    NotInitializedError,
    RankLostError,
    RendezvousError,
    TopologyError,
    UnsupportedError,
)
from dualdist.horovod_build.record import read_record
from dualdist.topology import RankLocation, Topology
from dualdist.utils import accelerator, network_interfaces
from dualdist.utils.deadline import Deadline, call_within, stop_at_exit
from dualdist.utils.horovod_names import real_horovod
from dualdist.utils.network_interfaces import StoreAddress
from dualdist.utils.variables import temporary_variables

Controller = Literal["gloo", "mpi"]
Variables = dict[str, "str | None"]  # None: unset
INSTALL = "dualdist install-horovod"
DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
SETS_PATCHED = "process_set.cc"  # the file of the patch that install-horovod records
# Horovod reduces no integers below 32 bits and no bfloat16.
REDUCE_DTYPES = frozenset((torch.float16, torch.float32, torch.float64, torch.int32, torch.int64))
POLL_S = 0.0001  # the pause between two polls of a handle; Horovod's own wait polls once a millisecond
SHUT_DOWN = "Horovod was shut down before all ranks were ready"  # which drops all handles
CALL_S = 1.0  # timeout of a connection to this process's own server


def slots_of(locations: Sequence[RankLocation]) -> list[dict[str, Any]]:
    """Return Horovod's SlotInfo of every rank. Its cross rank counts the nodes that have the same local rank."""
    local_sizes = Counter(location.node_rank for location in locations)
    columns: dict[int, list[int]] = defaultdict(list)
    for location in sorted(locations, key=lambda location: location.node_rank):
        columns[location.local_rank].append(location.node_rank)
    cross_ranks = {(node, local): index for local, nodes in columns.items() for index, node in enumerate(nodes)}
    return [
        {
            "hostname": f"node{location.node_rank}",
            "rank": rank,
            "size": len(locations),
            "local_rank": location.local_rank,
            "local_size": local_sizes[location.node_rank],
            "cross_rank": cross_ranks[location.node_rank, location.local_rank],
            "cross_size": len(columns[location.local_rank]),
        }
        for rank, location in enumerate(locations)
    ]


def engine_variables(controller: Controller, timeout_s: float) -> Variables:
    """Return variables that set Horovod's controller and timeouts.

    Horovod warns of a stalled rank before our wait ends. Its own shutdown of stalled jobs stays off: our timeout names
    the ranks and accounts for joined ones. The engine adds process sets while it runs if that blocks no other
    operation: a released Horovod holds the lock of its table while it communicates, which every operation takes.
    """
    record = read_record()
    is_patched = record is not None and any(SETS_PATCHED in patch for patch in record.patches or ())
    return {
        "HOROVOD_CONTROLLER": controller,
        "HOROVOD_CPU_OPERATIONS": controller,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": _seconds(timeout_s),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": _seconds(min(60, timeout_s / 2)),
        **({DYNAMIC_SETS: "1"} if is_patched else {}),
    }


def _seconds(value: float) -> str:
    return str(max(1, round(value)))


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
    collects = gc.isenabled()
    gc.disable()  # an import makes no garbage, and a search for it among all objects of torch takes 50 ms
    try:
        return importlib.import_module("horovod.torch")
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailableError(
            f"Horovod is installed but does not load ({error}): run `{INSTALL} --force`, or use --backend native"
        ) from error
    finally:
        if collects:
            gc.enable()


@real_horovod()
def is_built_with_mpi() -> bool:
    """Return True if a Horovod with MPI is installed."""
    if importlib.util.find_spec("horovod") is None:
        return False
    record = read_record()
    return bool(import_horovod().mpi_built()) if record is None or record.mpi is None else record.mpi


class HorovodOperation(Operation[torch.Tensor]):
    """An asynchronous operation of Horovod."""

    def __init__(self, hvd: ModuleType, handle: int) -> None:
        self._hvd = hvd
        self._handle = handle
        self._state = "running"

    def advance(self, wait_s: float) -> bool:
        if self._state == "ended":
            return True
        if self._state == "ending":  # synchronize() takes a handle once
            raise CollectiveError("it was interrupted as it ended")
        deadline = Deadline(wait_s)
        try:
            while not self._hvd.poll(self._handle):
                if deadline.passed():
                    return False
                deadline.sleep(POLL_S)
        except ValueError as error:
            raise CollectiveError(SHUT_DOWN) from error
        self._state = "ending"
        try:
            result = self._hvd.synchronize(self._handle)
        except RuntimeError as error:
            raise translate_error(error) from error
        self.result = result[0] if isinstance(result, tuple) else result  # an alltoall returns a pair
        self._state = "ended"
        return True


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

        def late() -> RankLostError:
            self._is_alone = True
            return RankLostError(
                f"Horovod could not end the group of ranks {list(ranks)} within {timeout_s:g} s: another rank does not "
                "answer"
            )

        call_within(timeout_s, lambda: self._hvd.remove_process_set(process_set), late)


class HorovodBackend(Backend):
    """Moves tensors through Horovod's engine, between the ranks of a process set; close() calls `leave`.

    Horovod matches operations by name in a process set, which groups of the same ranks share, and, on MPI, sessions.
    `key`, which differs between them, is a part of the names, or an abandoned operation would meet a later one.
    """

    name = "horovod"
    supported_reduce_dtypes = REDUCE_DTYPES

    def __init__(
        self,
        hvd: ModuleType,
        transport: str,
        ranks: Sequence[int],
        sets: ProcessSets,
        timeout_s: float,
        leave: Callable[[], None],
        key: str,
    ) -> None:
        self.transport = transport
        self.devices = frozenset(("cpu", accelerator.CUDA)) if transport == "nccl" else frozenset(("cpu",))
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(int(hvd.rank())) if int(hvd.rank()) in self.ranks else -1
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self.is_open = True
        self._hvd = hvd
        self._sets = sets
        self._set = sets.acquire(self.ranks)
        self._leave = leave
        self._key = key
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> HorovodOperation:
        return self._start(self._hvd.allreduce_async_, filled(buffer, source), name=name, op=self._ops[op])

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Operation[torch.Tensor]:
        work = self._start(self._hvd.allgather_async, tensor, name=name)
        return work if output is None else Converted(work, output.copy_)

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> HorovodOperation:
        return self._start(self._hvd.broadcast_async_, buffer, self.ranks[root], name=name)

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
    ) -> HorovodOperation:
        return self._start(self._hvd.alltoall_async, tensor, splits=list(sent), name=name)

    def duplicate(self, key: str) -> HorovodBackend:
        child = copy.copy(self)
        child.messenger, child._leave, child._key = None, lambda: None, f"{self._key}/{key}"
        return child

    def subgroup(self, ranks: Sequence[int], key: str) -> HorovodBackend:
        sets, members, timeout_s = self._sets, tuple(ranks), self.timeout_s
        leave = partial(sets.release, members, timeout_s)
        return HorovodBackend(self._hvd, self.transport, members, sets, timeout_s, leave, f"{self._key}/{key}")

    def built_with(self) -> dict[str, int]:
        hvd = self._hvd
        return {"gloo": int(hvd.gloo_built()), "mpi": int(hvd.mpi_built()), "nccl": int(hvd.nccl_built())}

    def close(self) -> None:
        self.is_open = False
        self._leave()

    def _start(self, start: Callable[..., int], *args: Any, name: str, **options: Any) -> HorovodOperation:
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        try:
            handle = start(*args, **options, name=f"{self._key}/{name}", process_set=self._set)
            return HorovodOperation(self._hvd, handle)
        except (RuntimeError, ValueError) as error:
            raise translate_error(error) from error


def translate_error(error: Exception) -> Exception:
    """Return the dualdist exception for one of Horovod."""
    text = " ".join(str(error).split()).split(". ")[0]
    if found := peer_error(text.lower(), text):
        return found
    if "mismatched" in text.lower():
        return MismatchError(text)
    if isinstance(error, ValueError):
        return UnsupportedError(f"Horovod cannot move this ({text})")
    return CollectiveError(text)


def start_on_mpi(context: InitContext) -> HorovodBackend:
    """Start Horovod on the MPI that the launcher started, or on an MPI of one rank.

    The engine is not shut down with the session: it would finish MPI, which cannot start again. It ends at exit.
    """
    if mpi_world.has_ended():
        raise UnsupportedError(
            "MPI was finished in this process, by a session on another backend, and cannot start again: "
            "start a new job, or set DUALDIST_TRANSPORT=gloo"
        )
    hvd, topology = import_horovod(), context.topology
    if not hvd.mpi_built():
        raise BackendUnavailableError(
            f"this Horovod was built without MPI: run `{INSTALL} --force` where mpicxx is on PATH, or set "
            "DUALDIST_TRANSPORT=gloo"
        )
    if not hvd.is_initialized():
        variables = {**engine_variables("mpi", context.timeout_s), **mpi_world.SINGLETON_VARIABLES}
        with temporary_variables(context.environ, variables):
            _init(hvd, topology, context.timeout_s)
    if (hvd.rank(), hvd.size()) != (topology.rank, topology.size):
        raise TopologyError(
            f"{topology.source} say rank {topology.rank} of {topology.size}, but Horovod's MPI says "
            f"rank {hvd.rank()} of {hvd.size()}: this Horovod was built with another MPI than the mpirun that "
            "started it; put that MPI's mpirun first on PATH, build again with `dualdist install-horovod --force`, "
            "or set DUALDIST_TRANSPORT=gloo"
        )
    return _over_all(hvd, "mpi", context, lambda: None, nullcontext)


def start_on_gloo(context: InitContext) -> HorovodBackend:
    """Start Horovod on Gloo, under any launcher: rank 0 serves Horovod's rendezvous and sets its address in the store.

    Every start has a new server, also under horovodrun: whenever one scope is complete, Horovod's server forgets how
    many ranks have left each scope (RendezvousHandler.do_DELETE clears all), and a second init could lose its keys.
    """
    hvd = import_horovod()
    if not hvd.gloo_built():
        raise BackendUnavailableError(f"this Horovod was built without Gloo: run `{INSTALL} --force`")
    if hvd.is_initialized():
        raise UnsupportedError(
            "Horovod runs over MPI in this process already and cannot change to Gloo: start a new job with "
            "DUALDIST_TRANSPORT=gloo"
        )
    topology, environ = context.topology, context.environ
    deadline = Deadline(context.timeout_s)
    slots = slots_of(context.locations)
    settings = engine_variables("gloo", context.timeout_s)
    settings |= {f"HOROVOD_{field.upper()}": str(value) for field, value in slots[topology.rank].items()}
    settings[ELASTIC] = None  # or the engine would ask this server for its slot, which it has
    server = ExitStack()  # runs on rank 0; closing the stack stops it
    if context.store is None:
        settings[STORE_ADDRESS] = None  # unset: a Horovod of one rank
    else:
        settings[STORE_ADDRESS], port = _serve_or_find(context, context.store, slots, deadline, server)
        settings[STORE_PORT] = str(port)
        settings[INTERFACE] = environ.get(INTERFACE) or context.interface or "lo"
    try:
        with temporary_variables(environ, settings):
            _init(hvd, topology, deadline.left_s())
    except BaseException:
        server.close()
        raise

    def leave() -> None:
        """Shut down the engine, with those of the other ranks; their programs continue."""
        late = f"Horovod could not shut down within {context.timeout_s:g} s"
        with server:
            call_within(context.timeout_s, hvd.shutdown, lambda: CollectiveTimeoutError(late))

    return _over_all(hvd, "gloo", context, leave, lambda: temporary_variables(environ, settings))


def _over_all(
    hvd: ModuleType,
    controller: Controller,
    context: InitContext,
    leave: Callable[[], None],
    engine_environment: Callable[[], AbstractContextManager[None]],
) -> HorovodBackend:
    """Return the backend of all ranks over a running engine."""
    transport = "nccl" if context.device.type == accelerator.CUDA and hvd.nccl_built() else controller
    sets = ProcessSets(hvd, engine_environment)
    return HorovodBackend(hvd, transport, range(int(hvd.size())), sets, context.timeout_s, leave, context.key)


def _serve_or_find(
    context: InitContext, store: Store, slots: Sequence[dict[str, Any]], deadline: Deadline, server: ExitStack
) -> tuple[str, int]:
    """Return the address and port of Horovod's rendezvous, which rank 0 serves until `server` is closed."""
    topology, key = context.topology, f"{context.key}/rendezvous"
    host, one_node = network_interfaces.host_identity(context.environ), topology.num_nodes == 1
    if topology.rank == 0:
        port = _serve(slots, server)
        published = StoreAddress.of(host, port, one_node=one_node)
        store.set(key, published.dumps())
        _require_ipv4(published, one_node=one_node)
        return (published.addresses or (network_interfaces.LOOPBACK,))[0], port
    try:
        published = StoreAddress.loads(store.get(key, deadline.left_s()))
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {topology.rank} waited {deadline.timeout_s:g} s for rank 0 to serve Horovod's rendezvous: "
            "see what rank 0 printed last"
        ) from error
    _require_ipv4(published, one_node=one_node)
    return published.reachable_address(host, deadline), published.port


def _require_ipv4(published: StoreAddress, *, one_node: bool) -> None:
    if not one_node and published.addresses and all(":" in address for address in published.addresses):
        raise BackendUnavailableError(
            f"Horovod's rendezvous needs IPv4, and the host of rank 0 has {' and '.join(published.addresses)} alone: "
            "choose the backend native"
        )


@real_horovod()
def _serve(slots: Sequence[dict[str, Any]], ending: ExitStack) -> int:
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = int(server.start())
    server._listen_thread.name = "dualdist-rendezvous"  # a daemon thread of ours, not of the program
    # An idle connection must not delay the end of the session or of the process.
    server._httpd.daemon_threads, server._httpd.block_on_close = True, False
    server.init([SlotInfo(**slot) for slot in slots])

    def stop() -> None:
        thread = threading.Thread(target=server.stop, name="dualdist-rendezvous-end")
        thread.start()
        # The server checks for its end twice a second, and at every connection.
        with contextlib.suppress(OSError):
            socket.create_connection((network_interfaces.LOOPBACK, port), CALL_S).close()
        thread.join()
        server._httpd.server_close()  # stop() does not close the socket

    ending.callback(stop)
    return port


def _init(hvd: ModuleType, topology: Topology, timeout_s: float) -> None:
    try:
        call_within(timeout_s, hvd.init, lambda: mpi_world.start_timeout(topology, "hvd.init()", timeout_s))
        atexit.register(stop_at_exit, hvd.shutdown)
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"Horovod could not connect rank {topology.rank} to the others ({error}); see its messages above. "
            f"If the hosts have several networks, name the one they share in {INTERFACE}"
        ) from error

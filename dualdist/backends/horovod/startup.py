"""Start of Horovod's engine on MPI or on Gloo, under any launcher."""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from dualdist.backends.base import InitContext, Store
from dualdist.backends.horovod.backend import (
    INSTALL,
    SINGLETON_VARIABLES,
    Controller,
    HorovodBackend,
    ProcessSets,
    Variables,
    engine_variables,
    import_horovod,
    slot_variables,
)
from dualdist.backends.mpi import world as mpi_world
from dualdist.environments.horovodrun import ELASTIC
from dualdist.errors import (
    BackendUnavailableError,
    DualdistError,
    RankLostError,
    RendezvousError,
    TopologyError,
    UnsupportedError,
)
from dualdist.horovod_build.record import read_record
from dualdist.topology import Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import Deadline, call_within, stop_at_exit
from dualdist.utils.horovod_names import real_horovod
from dualdist.utils.network_interfaces import StoreAddress
from dualdist.utils.temporary_env import temporary_variables

GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
# Timeout of a connection to this process's own server.
CALL_S = 1.0
SETS_PATCHED = "process_set.cc"  # a patch that install-horovod records


def _has_safe_dynamic_sets() -> bool:
    """Return True if adding process sets blocks no other operation.

    A released Horovod holds the lock of its table while it communicates, and every new operation takes that lock.
    """
    record = read_record()
    return record is not None and any(SETS_PATCHED in patch for patch in record.patches or ())


def _over_all(
    hvd: ModuleType,
    transport: str,
    timeout_s: float,
    leave: Callable[[], None],
    engine_environment: Callable[[], AbstractContextManager[None]],
) -> HorovodBackend:
    """Return the backend of all ranks over a running engine."""
    sets = ProcessSets(hvd, engine_environment)
    return HorovodBackend(hvd, transport, range(int(hvd.size())), hvd.global_process_set, sets, timeout_s, leave)


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
        variables = engine_variables("mpi", context.timeout_s, dynamic_sets=_has_safe_dynamic_sets())
        with temporary_variables(context.environ, {**variables, **SINGLETON_VARIABLES}):
            _init(hvd, topology, context.timeout_s)
    if (hvd.rank(), hvd.size()) != (topology.rank, topology.size):
        raise TopologyError(
            f"{topology.source} say rank {topology.rank} of {topology.size}, but Horovod's MPI says "
            f"rank {hvd.rank()} of {hvd.size()}: this Horovod was built with another MPI than the mpirun that "
            "started it; put that MPI's mpirun first on PATH, build again with `dualdist install-horovod --force`, "
            "or set DUALDIST_TRANSPORT=gloo"
        )
    return _over_all(hvd, _transport(hvd, "mpi", context.device), context.timeout_s, _no_server, nullcontext)


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
    slots = slot_variables(context.locations)
    settings = {
        **engine_variables("gloo", context.timeout_s, dynamic_sets=_has_safe_dynamic_sets()),
        **slots[topology.rank],
    }
    settings[ELASTIC] = None  # or the engine would ask this server for its slot, which it has
    stop_server: Callable[[], None] = _no_server
    if context.store is None:
        settings["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = None  # unset: a Horovod of one rank
    else:
        address, port, stop_server = _serve_or_find(topology, slots, context.store, context.key, environ, deadline)
        settings["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
        settings["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        settings[GLOO_INTERFACE] = environ.get(GLOO_INTERFACE) or context.interface or "lo"
    try:
        with temporary_variables(environ, settings):
            _init(hvd, topology, deadline.left_s())
    except BaseException:
        stop_server()
        raise

    def leave() -> None:
        try:
            _shut_down(hvd, context.timeout_s)
        finally:
            stop_server()

    transport = _transport(hvd, "gloo", context.device)
    return _over_all(hvd, transport, context.timeout_s, leave, lambda: temporary_variables(environ, settings))


def _no_server() -> None:
    """Stop nothing."""


def _serve_or_find(
    topology: Topology,
    slots: Sequence[Variables],
    store: Store,
    key: str,
    environ: MutableMapping[str, str],
    deadline: Deadline,
) -> tuple[str, int, Callable[[], None]]:
    """Return the address and port of Horovod's rendezvous, which rank 0 serves, and a function that stops it."""
    host = network_interfaces.host_identity(environ)
    if topology.rank == 0:
        port, stop = _serve(slots)
        store.set(f"{key}/rendezvous", StoreAddress.of(host, port, one_node=topology.num_nodes == 1).dumps())
        return (
            (network_interfaces.host_addresses() or [network_interfaces.LOOPBACK])[0]
            if topology.num_nodes > 1
            else network_interfaces.LOOPBACK,
            port,
            stop,
        )
    try:
        published = StoreAddress.loads(store.get(f"{key}/rendezvous", deadline.left_s()))
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {topology.rank} waited {deadline.timeout_s:g} s for rank 0 to serve Horovod's rendezvous: "
            "see what rank 0 printed last"
        ) from error
    return published.reachable_address(host, deadline), published.port, _no_server


@real_horovod()
def _serve(slots: Sequence[Variables]) -> tuple[int, Callable[[], None]]:
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = int(server.start())
    server._listen_thread.name = "dualdist-rendezvous"  # a daemon thread of ours, not of the program
    # An idle connection must not delay the end of the session or of the process.
    server._httpd.daemon_threads, server._httpd.block_on_close = True, False
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
        ending = threading.Thread(target=server.stop, name="dualdist-rendezvous-end")
        ending.start()
        # The server checks for its end twice a second, and at every connection.
        with contextlib.suppress(OSError):
            socket.create_connection((network_interfaces.LOOPBACK, port), CALL_S).close()
        ending.join()
        server._httpd.server_close()  # stop() does not close the socket

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
            f"Horovod could not connect rank {topology.rank} to the others ({error}); see its messages above. "
            f"If the hosts have several networks, name the one they share in {GLOO_INTERFACE}"
        ) from error


def _shut_down(hvd: ModuleType, timeout_s: float) -> None:
    """Shut down the engine, with those of the other ranks; their programs continue."""

    def late() -> DualdistError:
        return RankLostError(f"Horovod could not shut down within {timeout_s:g} s: another rank does not answer")

    call_within(timeout_s, hvd.shutdown, late)


def _transport(hvd: ModuleType, controller: Controller, device: torch.device) -> str:
    return "nccl" if device.type == "cuda" and hvd.nccl_built() else controller

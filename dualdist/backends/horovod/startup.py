"""How Horovod's engine is started, on MPI or on Gloo, under any launcher."""

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
from dualdist.environments.horovodrun import ELASTIC
from dualdist.errors import BackendUnavailableError, DualdistError, RankLostError, RendezvousError, UnsupportedError
from dualdist.horovod_build.record import read_record
from dualdist.topology import Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import Deadline, call_within, stop_at_exit
from dualdist.utils.horovod_names import real_horovod
from dualdist.utils.network_interfaces import StoreAddress
from dualdist.utils.temporary_env import temporary_variables

GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
# Seconds that a call to this process' own server may take.
CALL_S = 1.0
SETS_PATCHED = "process_set.cc"  # in the record of a Horovod that dualdist built


def _makes_sets_safely() -> bool:
    """Whether adding process sets while the engine runs holds up nobody: in Horovod as released, the engine keeps its
    table of them locked while it asks the other ranks, and beginning any operation waits for that lock.
    """
    record = read_record()
    return record is not None and any(SETS_PATCHED in patch for patch in record.patches or ())


def _over_all(
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
    hvd = import_horovod()
    if not hvd.mpi_built():
        raise BackendUnavailableError(
            f"this Horovod was built without MPI: run `{INSTALL} --force` where mpicxx is on PATH, or set "
            "DUALDIST_TRANSPORT=gloo"
        )
    if not hvd.is_initialized():
        with temporary_variables(
            environ, {**engine_variables("mpi", timeout_s, makes_sets=_makes_sets_safely()), **SINGLETON_VARIABLES}
        ):
            _init(hvd, topology, timeout_s)
    # Horovod's shutdown finishes MPI, which cannot start again: the engine stays for a next session, and ends with the
    # process.
    return _over_all(hvd, _transport(hvd, "mpi", device), timeout_s, _nothing, nullcontext)


def start_on_gloo(world: InitContext) -> HorovodBackend:
    """Start Horovod on Gloo, under any launcher: rank 0 serves Horovod's rendezvous and says so in our store.

    A new server for every start, also where horovodrun runs one: Horovod's server forgets how many ranks have left each
    scope whenever one scope is complete (RendezvousHandler.do_DELETE clears them all), so that a second init in the
    same processes can lose its keys.
    """
    hvd = import_horovod()
    if not hvd.gloo_built():
        raise BackendUnavailableError(f"this Horovod was built without Gloo: run `{INSTALL} --force`")
    if hvd.is_initialized():
        raise UnsupportedError(
            "Horovod runs over MPI in this process already and cannot change to Gloo: start a new job with "
            "DUALDIST_TRANSPORT=gloo"
        )
    topology, environ = world.topology, world.environ
    deadline = Deadline(world.timeout_s)
    slots = slot_variables(world.places)
    settings = {**engine_variables("gloo", world.timeout_s, makes_sets=_makes_sets_safely()), **slots[topology.rank]}
    settings[ELASTIC] = None  # the engine would ask this server for what horovodrun's has told us already
    stop_server: Callable[[], None] = _nothing
    if world.store is None:
        settings["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = None  # unset, Horovod makes a world of one
    else:
        address, port, stop_server = _serve_or_find(topology, slots, world.store, world.key, environ, deadline)
        settings["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
        settings["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        settings[GLOO_INTERFACE] = environ.get(GLOO_INTERFACE) or world.interface or "lo"
    try:
        with temporary_variables(environ, settings):
            _init(hvd, topology, deadline.left_s())
    except BaseException:
        stop_server()
        raise

    def leave() -> None:
        try:
            _shut_down(hvd, world.timeout_s)
        finally:
            stop_server()

    transport = _transport(hvd, "gloo", world.device)
    return _over_all(hvd, transport, world.timeout_s, leave, lambda: temporary_variables(environ, settings))


def _nothing() -> None:
    """What there is to stop where nothing was started."""


def _serve_or_find(
    topology: Topology,
    slots: Sequence[Variables],
    store: Store,
    key: str,
    environ: MutableMapping[str, str],
    deadline: Deadline,
) -> tuple[str, int, Callable[[], None]]:
    """Address and port of Horovod's rendezvous, and what stops it: served by rank 0, found by the others."""
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
        invitation = StoreAddress.loads(store.get(f"{key}/rendezvous", deadline.left_s()))
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {topology.rank} waited {deadline.timeout_s:g} s for rank 0 to serve Horovod's rendezvous: "
            "see what rank 0 printed last"
        ) from error
    return invitation.reachable_address(host, deadline), invitation.port, _nothing


@real_horovod()
def _serve(slots: Sequence[Variables]) -> tuple[int, Callable[[], None]]:
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = int(server.start())
    server._listen_thread.name = "dualdist-rendezvous"  # no thread of the program's
    # Whoever connects and says nothing must not hold the end of the session, nor that of the process.
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
        # The server looks twice a second whether it shall end, and whenever somebody calls.
        with contextlib.suppress(OSError):
            socket.create_connection((network_interfaces.LOOPBACK, port), CALL_S).close()
        ending.join()
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

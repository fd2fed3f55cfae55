"""The process's session, from init() to shutdown(); holds the package's one mutable module variable.

Note [forked child]: a process that is forked from a rank has its connections, and would send and receive in its place;
and it lacks the threads for which Gloo, MPI and Horovod wait at exit. So it has no session: calls are errors. Nothing
that it inherited is finalized when it exits, as in children of multiprocessing, which skip the interpreter's end: no
handlers of atexit, no finalizers, no destructors in C++.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pkgutil
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from dualdist.backends import registry
from dualdist.collectives.arguments import REDUCTIONS, Reduction, as_ints, check_limit
from dualdist.environments import detect
from dualdist.errors import (
    CLOSED,
    AlreadyInitializedError,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    DualdistError,
    NotInitializedError,
    RendezvousError,
    TopologyError,
    UnsupportedError,
    UsageError,
)
from dualdist.liveness import failed_exit
from dualdist.liveness.joined_rank import mark_rank, refuse_child, unmark_rank
from dualdist.rendezvous.backend_selection import BACKEND, TRANSPORT, check_choice, describe_choice
from dualdist.rendezvous.connect import connect_ranks
from dualdist.rendezvous.elastic_agent import LOSS_REPORT_S, ElasticAgent
from dualdist.rendezvous.rank_assignment import processes_here
from dualdist.rendezvous.records import Connected, RendezvousStore, Request
from dualdist.utils import tracebacks
from dualdist.utils.deadline import Deadline
from dualdist.utils.suggest import require_choice
from dualdist.utils.variables import OUTPUT, THREADS, unknown_variables

if TYPE_CHECKING:
    import torch

    from dualdist.backends.base import Backend, Store
    from dualdist.collectives.group import Group
    from dualdist.liveness.rank_status import StatusServer
    from dualdist.topology import Topology

# Objects that follow each session, as "module:name" separated by commas; each is a SessionObserver.
OBSERVERS = "DUALDIST_OBSERVERS"
# The default of the argument `reduction`.
REDUCTION = "DUALDIST_REDUCTION"


@dataclass(frozen=True)
class Session:
    """An open session: the group of all ranks, this rank's location and device, and what was created since."""

    world: Group
    topology: Topology
    device: torch.device
    timeout_s: float
    hosts: tuple[int, ...]  # for each rank, the lowest rank on the same host
    store: Store | None  # None if there is one rank
    key: str  # prefix of this session's keys in the store
    status_server: StatusServer
    groups: list[Group] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)  # objects that other modules keep until shutdown
    close_callbacks: list[Callable[[], None]] = field(default_factory=list)  # called before the groups close

    @property
    def backend(self) -> Backend:
        return self.world.backend

    @property
    def ignored_failure(self) -> str:
        """Return why an operation failed, if the program continued regardless, or ""."""
        return next((group.ignored_failure for group in (self.world, *self.groups) if group.ignored_failure), "")

    def close(self) -> None:
        """Close the groups, the newest first, and the backend; the rank probe last, since errors on the way use it."""
        with contextlib.ExitStack() as stack:  # closes all of them, last in first out, even if one fails
            if self.world.monitor.probe is not None:
                stack.callback(self.world.monitor.probe.close)
            stack.callback(self.status_server.close)
            for group in (self.world, *self.groups):
                stack.callback(group.close)
            self.groups.clear()
            unmark_rank(os.environ)


class SessionObserver:
    """Follows every session of this process, after add_observer(); a method that is not overridden does nothing.

    What it appends to Group.observers is called for each operation: see Channel.observers.
    """

    def opened(self, session: Session, environ: Mapping[str, str]) -> None:
        """Follow a session that init() has opened; an exception closes it. Its close_callbacks tell of its end."""

    def group_created(self, session: Session, group: Group) -> None:
        """Follow a group that new_group() has created."""

    def optimizer_wrapped(self, session: Session, optimizer: torch.optim.Optimizer, gradients: SentGradients) -> None:
        """Follow an optimizer that reduces gradients from now on."""


@dataclass(frozen=True)
class SentGradients:
    """The reduction of a wrapped optimizer's gradients, and its cost.

    `reduction` is the one that the program asked for, None for the default; `sent_bytes` returns the bytes that this
    rank sent for the last steps of optimizers.
    """

    reduction: str | None
    sent_bytes: Callable[[Sequence[torch.optim.Optimizer]], int]


@dataclass
class _ProcessState:
    """State that outlives sessions."""

    session: Session | None = None
    was_shut_down: bool = False
    sessions: int = 0
    groups: int = 0  # created by new_group() in any session
    exported: tuple[str, ...] = ()  # variables set by export_env(), removed by the next init()
    rendezvous_store: RendezvousStore = field(default_factory=RendezvousStore)
    observers: list[SessionObserver] = field(default_factory=list)
    has_reported_choice: bool = False
    ignored_failure: str = ""  # the last session's failure, if the program went on despite it
    forked_from: Topology | None = None  # of the rank with a session that forked this process: Note [forked child]


_process = _ProcessState()


def current() -> Session:
    """Return the open session; NotInitializedError if there is none."""
    if _process.session is None:
        tracebacks.install_hooks(os.environ)
        _require_unforked()
        when = "after dd.shutdown()" if _process.was_shut_down else "before dd.init()"
        raise NotInitializedError(f"dualdist was used {when}: call dd.init() first, on every rank")
    return _process.session


def _require_unforked() -> None:
    """Raise NotInitializedError in a forked child."""
    if _process.forked_from is not None:
        raise NotInitializedError(
            f"this process is a child that rank {_process.forked_from.rank} forked after dd.init(), and no rank: call "
            "dualdist in the rank itself, and give the child its results; or fork before dd.init()"
        )


def _leave_to_parent() -> None:
    """Give a forked child no session: Note [forked child]."""
    session = _process.session
    if session is None:
        return
    _process.forked_from, _process.session = session.topology, None
    for group in (session.world, *session.groups):
        group.channel.latch.is_open = False  # for optimizers and others that hold it
    for inherited in (session, _process.rendezvous_store):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # of glibc: _exit(status) before the destructors
        libc.on_exit(libc._exit, None)


def group_or_world(group: Group | None) -> Group:
    """Return the group, or that of all ranks if None."""
    world = (_process.session or current()).world
    if group is not None and not isinstance(group, type(world)):
        raise UsageError(f"group={group!r}: expected a group that dd.new_group() returned")
    return group or world


def find_group(number: int) -> Group:
    """Return the group of a number, which a compiled graph holds; NotInitializedError if it has been removed."""
    here = current()
    found = next((group for group in (here.world, *here.groups) if group.number == number), None)
    if found is None:
        raise NotInitializedError(CLOSED)
    return found


def is_open() -> bool:
    return _process.session is not None


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the size, a forked child's parent's; before init() the launcher's, or (0, 1)."""
    try:
        topology = _process.session.topology if _process.session else _process.forked_from or detect(os.environ)
    except TopologyError:
        return 0, 1
    return topology.rank, topology.size


def output_mode() -> str:
    """Return how `dualdist run` shows what this rank writes: "tagged", "terminal" or ""."""
    return os.environ.get(OUTPUT, "")


def elastic_agent() -> ElasticAgent | None:
    """Return the connection to the `dualdist run --min-ranks` that started this process, None without one."""
    return _process.rendezvous_store.agent


def note_state() -> None:
    """Note for `dualdist run` that this program has the training's state, which it may give to others."""
    if (agent := elastic_agent()) is not None:
        agent.has_state = True


def note_timeout(error: BaseException) -> None:
    """Note for `dualdist run` whether an operation ended by its time limit: then a rank that is late has hung."""
    if (agent := elastic_agent()) is not None:
        agent.timed_out = isinstance(error, CollectiveTimeoutError)


def init(backend: str | None = None, *, timeout_s: float = 300, sets_default_group: bool = True) -> None:
    """Open the session; see dualdist.api.init. The native backend sets torch's default group up if asked to.

    If a rank is lost meanwhile and `dualdist run` keeps the others, they meet again without it.
    """
    while True:
        try:
            _init_once(backend, timeout_s, sets_default_group)
            return
        except (CollectiveError, RendezvousError) as error:
            agent = elastic_agent()
            if agent is None or not (loss := agent.find_loss(agent.generation, LOSS_REPORT_S)):
                raise
            print(f"dualdist: {loss} before the ranks had met ({error}); they meet again", file=sys.stderr, flush=True)


def _init_once(backend: str | None, timeout_s: float, sets_default_group: bool) -> None:
    tracebacks.install_hooks(os.environ)
    _require_unforked()
    if _process.session is not None:
        raise AlreadyInitializedError(
            f"dd.init() was called a second time; this process is rank {_process.session.topology.rank} of "
            f"{_process.session.topology.size} already. Call dd.shutdown() first, as to run a notebook's cell again"
        )
    check_limit(timeout_s)
    environ = os.environ
    for name in _process.exported:
        environ.pop(name, None)
    _process.exported = ()
    requested, transport = requested_choice(backend, environ)
    refuse_child(environ, detect(environ))  # before the launcher is asked for a rank
    key = _process.rendezvous_store.next_key(environ, _process.sessions, timeout_s)
    _process.sessions += 1
    if _process.sessions == 1:
        atexit.register(_exit_if_failed)  # registered before the backend's callbacks, so it runs after them
        os.register_at_fork(after_in_child=_leave_to_parent)
    for place in filter(None, environ.get(OBSERVERS, "").split(",")):
        add_observer(_load_observer(place))
    reduction = environ.get(REDUCTION) or "unordered"
    require_choice(reduction, REDUCTIONS, REDUCTION)
    topology = detect(environ)
    for problem in unknown_variables(environ):
        # Shown by rank 0, and raised on all ranks where warnings are errors.
        with contextlib.nullcontext() if topology.rank == 0 else warnings.catch_warnings(record=True):
            warnings.warn(problem, stacklevel=5)  # the line of the program that calls dd.init()
    request = Request(topology, environ, transport, key, timeout_s, _process.rendezvous_store, sets_default_group)
    session = open_session(requested, request)
    if session.topology.rank == 0 and _process.sessions == 1 and not environ.get(THREADS):
        _report_threads(session.topology.local_size)
    session.world.reduction = cast("Reduction", reduction)
    _process.session, _process.ignored_failure = session, ""
    try:
        for observer in _process.observers:
            observer.opened(session, environ)
    except BaseException:
        _process.session = None
        session.close()
        raise


def _report_threads(local_size: int) -> None:
    """Print what to set if the ranks of this host have more threads together than it has cores."""
    import torch

    from dualdist.utils.machine import cores_per_rank, machine_cores

    threads, share = torch.get_num_threads(), cores_per_rank(local_size)
    if local_size > 1 and threads > share:
        print(
            f"dualdist: the {local_size} ranks of this host have {threads} threads each, for {machine_cores()} cores: "
            f"set {THREADS}={share}, as dualdist run and dualdist exec do",
            file=sys.stderr,
            flush=True,
        )


def add_observer(observer: SessionObserver) -> None:
    """Let the observer follow the sessions that are opened from now on; a second call with it does nothing."""
    if observer not in _process.observers:
        _process.observers.append(observer)


def _load_observer(place: str) -> SessionObserver:
    """Return the observer "module:name"; raise UsageError if there is none."""
    try:
        found = pkgutil.resolve_name(place)
    except Exception as error:  # of the module, too
        raise UsageError(f"{OBSERVERS}: {place!r} cannot be loaded ({error}): expected module:name") from error
    if not isinstance(found, SessionObserver):
        raise UsageError(f"{OBSERVERS}: {place!r} is no dualdist.session.SessionObserver")
    return found


def requested_choice(backend: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the backend and the transport, "" for any; raise UsageError if there is none of the name."""
    requested, transport = backend or environ.get(BACKEND) or registry.AUTO, environ.get(TRANSPORT, "")
    if requested not in registry.CHOICES:
        check_choice(requested, registry.choices(), "backend", BACKEND)
    if transport:
        check_choice(transport, registry.transports(), "transport", TRANSPORT)
    return requested, transport


def open_session(requested: str, request: Request) -> Session:
    """Open a session; raise UnsupportedError if it runs over another transport than the requested one."""
    connected = connect_ranks(requested, request, _print_choice)
    session = _start(connected, request)
    mark_rank(os.environ, session.topology)
    transport, actual = request.transport, session.backend.transport
    if (saved := connected.saved) is not None and session.topology.rank == 0:
        instead = "" if actual == saved.transport else f"; here it runs over {actual} instead"
        _print_choice(f"{describe_choice(saved, request.environ)}{instead}")
    # A single rank has nothing to share memory with.
    is_alone = session.topology.size == 1 and transport == "shm"
    spec = registry.find(session.backend.name)
    if transport in ("", actual) or actual == "none" or (is_alone and spec and transport in spec.transports):
        return session
    session.close()
    raise UnsupportedError(
        f"{TRANSPORT}={transport}, but the backend {session.backend.name} runs over {actual} "
        "here: unset it, or choose a backend and a launcher that support it"
    )


def _start(connected: Connected, request: Request) -> Session:
    """Return the session of connected ranks.

    The group of all ranks has its own connections for CPU tensors: the program may use torch's default group while a
    thread uses ours.
    """
    from dualdist.backends.staging import with_staging
    from dualdist.collectives.group import Group
    from dualdist.engine.monitor import Monitor
    from dualdist.liveness.process_state import ProcessIdentity
    from dualdist.liveness.rank_probe import RankProbe
    from dualdist.liveness.rank_status import StatusServer

    topology, locations, timeout_s = connected.topology, connected.locations, request.timeout_s
    device = request.device(topology)
    backend = with_staging(connected.backend, device)
    store = None if topology.size == 1 else connected.store
    hosts = tuple(location.host for location in locations)
    opened: list[Callable[[], None]] = [backend.close]
    try:
        probe = None
        if store is not None:
            processes = processes_here(locations, topology.rank)
            probe = RankProbe(store, backend.rank, f"{connected.key}/roll", processes, timeout_s)
            opened.append(probe.close)
        monitor = Monitor(probe, backend.ranks, "all ranks")
        with monitor.operation("dd.init"):
            operations = backend.duplicate("operations")
            _share_messages(operations, store, f"{connected.key}/requests", hosts, timeout_s)
    except BaseException:
        for close in opened[::-1]:  # or the next init() would take torch's default group for the program's own
            with contextlib.suppress(DualdistError):  # the first error says more
                close()
        raise
    world = Group(operations, monitor, timeout_s, backend)
    groups: list[Group] = []
    first = locations[0].process
    server = StatusServer(
        topology,
        ProcessIdentity.loads(first).pid if first else os.getpid(),
        probe,
        lambda: sum(group.gradient_reductions for group in (world, *groups)),
    )
    return Session(world, topology, device, timeout_s, hosts, store, connected.key, server, groups)


def _share_messages(backend: Backend, store: Store | None, key: str, hosts: Sequence[int], timeout_s: float) -> None:
    """Let messages go through shared memory if the backend's ranks share a host; all of them call this."""
    ranks, index = backend.ranks, backend.rank
    if store is None or index < 0 or len(ranks) == 1 or len({hosts[rank] for rank in ranks}) > 1:
        return
    if backend.messenger is not None:
        return
    from dualdist.backends.shm.host import MESSAGE_SLOT_BYTES, connect_host

    with contextlib.suppress(BackendUnavailableError):  # messages go over the backend
        backend.messenger = connect_host(store, key, ranks, index, MESSAGE_SLOT_BYTES, Deadline(timeout_s))


def _print_choice(message: str) -> None:
    """Print the choice of a backend, once per process."""
    if not _process.has_reported_choice:
        _process.has_reported_choice = True
        print(f"dualdist: {message}", file=sys.stderr, flush=True)


def announce_optimizer(optimizer: torch.optim.Optimizer, gradients: SentGradients) -> None:
    """Tell the observers of an optimizer that reduces gradients from now on."""
    for observer in _process.observers:
        observer.optimizer_wrapped(current(), optimizer, gradients)


def export_env(values: Mapping[str, str]) -> None:
    """Set variables as a launcher would, unless one is set already; the next init() removes them."""
    if not any(name in os.environ for name in values):
        os.environ.update(values)
        _process.exported = tuple(values)


def shutdown() -> None:
    if _process.forked_from is not None:
        return  # the session is the parent's
    session = current()
    _process.session, _process.ignored_failure = None, session.ignored_failure
    _process.was_shut_down = True
    with contextlib.ExitStack() as stack:  # runs all of them even if one fails
        stack.callback(session.close)
        for callback in reversed(session.close_callbacks):
            stack.callback(callback)


def _exit_if_failed() -> None:
    session = _process.session
    failed_exit.exit_if_failed(_process.ignored_failure if session is None else session.ignored_failure)


def built_with() -> dict[str, int]:
    """Return versions of gloo, mpi and nccl in the backend in use, before init() in native; 0: absent, 1: unknown."""
    if is_open():
        return current().backend.built_with()
    from dualdist.backends.native import backend as native

    return native.built_with()


def new_group(ranks: Sequence[int]) -> Group:
    from dualdist.collectives.collectives import run_agreed
    from dualdist.collectives.group import Group
    from dualdist.engine.monitor import Monitor

    session = current()
    members = sorted(as_ints(ranks, "ranks"))
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(session.topology.size)):
        raise UsageError(f"ranks {members}: expected different ranks of this job, 0 to {session.topology.size - 1}")
    world = session.world
    name = world.next_name("new_group")
    backend = run_agreed(world, "new_group", name, {"ranks": members}, lambda backend: backend.subgroup(members, name))
    _share_messages(backend, session.store, f"{session.key}/{name}", session.hosts, session.timeout_s)
    _process.groups += 1
    monitor = Monitor(world.monitor.probe, members, name)
    group = Group(backend, monitor, session.timeout_s, number=_process.groups)
    group.reduction = world.reduction
    session.groups.append(group)
    for observer in _process.observers:
        observer.group_created(session, group)
    return group


def remove_group(group: Group) -> None:
    from dualdist.collectives.collectives import run_agreed

    session = current()
    if group not in session.groups:
        raise UsageError("remove_group takes a group that dd.new_group returned in this session, once")
    world = session.world
    ranks = {"ranks": list(group.ranks)}
    run_agreed(world, "remove_group", world.next_name("remove_group"), ranks, lambda backend: group.close())
    session.groups.remove(group)

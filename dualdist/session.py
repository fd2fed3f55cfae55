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
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dualdist.backends import registry
from dualdist.backends.horovod.driver import is_elastic, next_slot
from dualdist.collectives.arguments import REDUCTIONS, Reduction, as_ints, check_limit
from dualdist.environments import detect
from dualdist.environments.horovodrun import ELASTIC
from dualdist.errors import (
    CLOSED,
    AlreadyInitializedError,
    NotInitializedError,
    TopologyError,
    UnsupportedError,
    UsageError,
)
from dualdist.monitoring import failed_exit
from dualdist.rendezvous.backend_selection import BACKEND, TRANSPORT, check_choice
from dualdist.rendezvous.open_session import RendezvousStore, Session, SessionConfig, open_session, share_messages
from dualdist.utils import tracebacks
from dualdist.utils.suggest import require_choice
from dualdist.utils.variables import OUTPUT, TIMELINE, unknown_variables

if TYPE_CHECKING:
    import torch

    from dualdist.collectives.group import Group
    from dualdist.diagnostics.recording import Recorder
    from dualdist.diagnostics.timeline import TimelineWriter
    from dualdist.engine.channel import Observer
    from dualdist.topology import Topology

# Set by `dualdist compare` for a program that it times: a folder, the warm-up steps and the steps to time.
RECORD, RECORD_WARMUP, RECORD_STEPS = "DUALDIST_RECORD", "DUALDIST_RECORD_WARMUP", "DUALDIST_RECORD_STEPS"
# If set, rank 0 prints a table of slow ranks at the end.
SLOW_RANKS = "DUALDIST_SLOW_RANKS"
# The default of the argument `reduction`.
REDUCTION = "DUALDIST_REDUCTION"


@dataclass
class _ProcessState:
    """State that outlives sessions."""

    session: Session | None = None
    was_shut_down: bool = False
    sessions: int = 0
    groups: int = 0  # created by new_group() in any session
    exported: tuple[str, ...] = ()  # variables set by export_env(), removed by the next init()
    rendezvous_store: RendezvousStore = field(default_factory=RendezvousStore)
    recorder: Recorder | None = None
    timeline: TimelineWriter | None = None
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


def init(backend: str | None = None, *, timeout_s: float = 300, sets_default_group: bool = True) -> None:
    """Open the session; see dualdist.api.init. The native backend sets torch's default group up if asked to."""
    tracebacks.install_hooks(os.environ)
    _require_unforked()
    if _process.session is not None:
        raise AlreadyInitializedError(
            f"dd.init() was called a second time; this process is rank {_process.session.topology.rank} of "
            f"{_process.session.topology.size} already. Call dd.shutdown() first, as to run a notebook's cell again"
        )
    check_limit(timeout_s)
    environ, began = os.environ, time.time()
    for name in _process.exported:
        environ.pop(name, None)
    _process.exported = ()
    requested, transport = requested_choice(backend, environ)
    name = _next_name(environ, timeout_s)
    _process.sessions += 1
    if _process.sessions == 1:
        atexit.register(_exit_if_failed)  # registered before the backend's callbacks, so it runs after them
        os.register_at_fork(after_in_child=_leave_to_parent)
    reduction = environ.get(REDUCTION) or "unordered"
    require_choice(reduction, REDUCTIONS, REDUCTION)
    plan = _recording_plan(environ)
    topology = detect(environ)
    for problem in unknown_variables(environ):
        # Shown by rank 0, and raised on all ranks where warnings are errors.
        with contextlib.nullcontext() if topology.rank == 0 else warnings.catch_warnings(record=True):
            warnings.warn(problem, stacklevel=4)  # the line of the program that calls dd.init()
    session = open_as_requested(
        requested,
        SessionConfig(topology, environ, transport, name, timeout_s, _process.rendezvous_store, sets_default_group),
    )
    session.world.reduction = cast("Reduction", reduction)
    _process.session, _process.ignored_failure = session, ""
    if environ.get(TIMELINE):
        _start_timeline(session, environ[TIMELINE])
    if environ.get(SLOW_RANKS, "0") not in ("", "0"):
        from dualdist.diagnostics.stragglers import report_at_shutdown

        session.close_callbacks.append(report_at_shutdown(session.world))
    if plan is not None and _process.recorder is None:
        from dualdist.diagnostics.recording import recorder_of

        _process.recorder = recorder_of(session, *plan, began)


def requested_choice(backend: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the backend and the transport, "" for any; raise UsageError if there is none of the name."""
    requested, transport = backend or environ.get(BACKEND) or registry.AUTO, environ.get(TRANSPORT, "")
    if requested not in registry.CHOICES:
        check_choice(requested, registry.choices(), "backend", BACKEND)
    if transport:
        check_choice(transport, registry.transports(), "transport", TRANSPORT)
    return requested, transport


def open_as_requested(requested: str, config: SessionConfig) -> Session:
    """Open a session; raise UnsupportedError if it runs over another transport than the requested one."""
    session, transport = open_session(requested, config, _print_choice), config.transport
    if transport in ("", session.backend.transport) or session.backend.transport == "none":
        return session
    spec = registry.find(session.backend.name)
    # A single rank has nothing to share memory with.
    if not (session.topology.size == 1 and spec is not None and transport == "shm" and transport in spec.transports):
        session.close()
        raise UnsupportedError(
            f"{TRANSPORT}={transport}, but the backend {session.backend.name} runs over {session.backend.transport} "
            "here: unset it, or choose a backend and a launcher that support it"
        )
    return session


def _next_name(environ: MutableMapping[str, str], timeout_s: float) -> str:
    """Return the new session's key in the store: the same on all ranks, and not used before."""
    if not is_elastic(environ):
        return f"dualdist/{_process.sessions}"
    if _process.sessions:
        environ.update(next_slot(environ, timeout_s))
        _process.rendezvous_store = RendezvousStore()  # an unused one: another process may be rank 0 now
    return f"dualdist/{ELASTIC}"  # not numbered: ranks that were started later have had fewer sessions


def _recording_plan(environ: Mapping[str, str]) -> tuple[Path, int, int] | None:
    """Return the folder, the warm-up steps and the steps to time if `dualdist compare` set the variables."""
    if RECORD not in environ:
        return None
    try:
        return Path(environ[RECORD]), int(environ[RECORD_WARMUP]), int(environ[RECORD_STEPS])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{RECORD} is set, but {RECORD_WARMUP} or {RECORD_STEPS} is not a number: dualdist compare sets all three; "
            f"unset {RECORD}"
        ) from error


def _start_timeline(session: Session, path: str) -> None:
    """Trace the session; the file is complete after shutdown()."""
    from dualdist.diagnostics.timeline import start_timeline

    backend = session.backend
    about = f"{backend.name} over {backend.transport}, {session.topology.launcher}"
    try:
        _process.timeline = start_timeline(path, session.world, _process.sessions - 1, about)
    except UsageError:
        _process.session = None
        session.close()
        raise
    session.close_callbacks.append(_process.timeline.finish)


def set_observers(group: Group, *observers: Observer) -> None:
    """Replace the group's observers, but for the timeline."""
    group.observers[:] = observers
    if _process.timeline is not None:
        _process.timeline.listener.observe(group)


def _print_choice(message: str) -> None:
    """Print the choice of a backend, once per process."""
    if not _process.has_reported_choice:
        _process.has_reported_choice = True
        print(f"dualdist: {message}", file=sys.stderr, flush=True)


def record_steps(
    optimizer: torch.optim.Optimizer,
    sent_bytes: Callable[[Sequence[torch.optim.Optimizer]], int],
    reduction: str | None = None,
) -> None:
    """Record the wrapped optimizer's steps for `dualdist compare` and the timeline, if either is active."""
    if _process.recorder is not None:
        _process.recorder.attach(optimizer, reduction, sent_bytes)
    if _process.timeline is not None:
        _process.timeline.listener.attach(optimizer)


def export_env(values: Mapping[str, str]) -> None:
    """Set variables as a launcher would, unless one is set already; the next init() removes them."""
    if not any(name in os.environ for name in values):
        os.environ.update(values)
        _process.exported = tuple(values)


def shutdown() -> None:
    if _process.forked_from is not None:
        return  # the session is the parent's
    session = current()
    if _process.recorder is not None:
        _process.recorder.finish()
    _process.session, _process.ignored_failure = None, session.ignored_failure
    _process.was_shut_down = True
    with contextlib.ExitStack() as stack:  # runs all of them even if one fails
        stack.callback(session.close)
        stack.callback(setattr, _process, "timeline", None)
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
    share_messages(backend, session.store, f"{session.key}/{name}", session.hosts, session.timeout_s)
    _process.groups += 1
    monitor = Monitor(world.monitor.probe, members, name)
    group = Group(backend, monitor, session.timeout_s, number=_process.groups)
    group.reduction = world.reduction
    session.groups.append(group)
    set_observers(group)
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

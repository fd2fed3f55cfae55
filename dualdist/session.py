"""From init() to shutdown(): which backend this process uses, and where it stands. Has the one mutable variable."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualdist.arguments import whole
from dualdist.deadline import Deadline
from dualdist.environments import detect
from dualdist.errors import (
    AlreadyInitializedError,
    BackendUnavailableError,
    DualdistError,
    NotInitializedError,
    TopologyError,
    UnsupportedError,
    UsageError,
)
from dualdist.network import host_identity
from dualdist.placement import Place, Report, placed, report_of, settle
from dualdist.topology import Topology

if TYPE_CHECKING:
    import torch

    from dualdist.backends.base import Backend, Store
    from dualdist.choices import Saved
    from dualdist.group import Group
    from dualdist.mailbox import Mailbox
    from dualdist.recording import Recorder

BACKEND = "DUALDIST_BACKEND"
TRANSPORT = "DUALDIST_TRANSPORT"
HOROVOD_CONTROLLER = "HOROVOD_CONTROLLER"
# Set by `dualdist compare` for a program that it times: a folder, and how many steps to leave out and to time.
RECORD, RECORD_WARMUP, RECORD_STEPS = "DUALDIST_RECORD", "DUALDIST_RECORD_WARMUP", "DUALDIST_RECORD_STEPS"
TORCHRUN_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
STORE = "dualdist.store"
BACKENDS = ("auto", "native", "horovod", "mpi")
TRANSPORTS = ("gloo", "shm", "mpi", "nccl")
# Launchers that belong to one backend; the others start ranks for any.
HOROVODS_OWN = ("horovodrun",)
MPIS_OWN = ("mpirun", "mpiexec", "jsrun")


@dataclass(frozen=True)
class Session:
    """What init() made: the group of all ranks, this rank's place and device, and what was made since."""

    world: Group
    topology: Topology
    device: torch.device
    timeout_s: float
    hosts: tuple[int, ...]  # of each rank, the lowest rank that shares its host
    store: Store | None  # None where there is one rank
    key: str  # of what this session keeps in the store
    groups: list[Group] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)  # what other faces keep as long as the session
    endings: list[Callable[[], None]] = field(default_factory=list)  # what is to be done while all ranks are there

    @property
    def backend(self) -> Backend:
        return self.world.backend

    def close(self) -> None:
        """End the groups and the backend; the roll call last, for what fails on the way asks it."""
        for group in (*self.groups, self.world):
            group.close()
        self.groups.clear()
        if self.world.watch.roll is not None:
            self.world.watch.roll.close()


@dataclass
class _Process:
    """What this process remembers between sessions."""

    session: Session | None = None
    was_shut_down: bool = False
    sessions: int = 0
    exported: tuple[str, ...] = ()  # variables that export() set, and the next init() takes away
    store: Store | None = None  # at which the ranks met; rank 0 serves it for as long as its process lives
    recorder: Recorder | None = None
    has_told_choice: bool = False


_process = _Process()


def current() -> Session:
    """The open session; NotInitializedError where there is none."""
    if _process.session is None:
        when = "after dd.shutdown()" if _process.was_shut_down else "before dd.init()"
        raise NotInitializedError(f"dualdist was used {when}: call dd.init() first, on every rank")
    return _process.session


def group_or_world(group: Group | None) -> Group:
    """The group, or that of all ranks; NotInitializedError where there is no session."""
    return current().world if group is None else group


def is_open() -> bool:
    return _process.session is not None


def init(backend: str | None = None, *, timeout_s: float = 300) -> None:
    """Join the job; see dualdist.api.init."""
    if _process.session is not None:
        raise AlreadyInitializedError(
            f"dd.init() was called a second time; this process is rank {_process.session.topology.rank} of "
            f"{_process.session.topology.size} already. Call dd.shutdown() in between to start anew"
        )
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise UsageError(f"timeout_s={timeout_s}: expected seconds above 0 and below {threading.TIMEOUT_MAX:g}")
    environ, began = os.environ, time.time()
    for name in _process.exported:
        environ.pop(name, None)
    _process.exported = ()
    requested = checked_choice(backend or environ.get(BACKEND) or "auto", BACKENDS, "backend", BACKEND)
    transport = checked_choice(environ.get(TRANSPORT) or "", ("", *TRANSPORTS), "transport", TRANSPORT)
    # The same on all ranks, and new for every session and every restart of torchrun, whose store outlives its workers.
    name = f"dualdist/{environ.get(TORCHRUN_RESTARTS, '0')}/{_process.sessions}"
    _process.sessions += 1
    session = _open(requested, transport, environ, name, timeout_s)
    has_nobody_to_share_with = session.topology.size == 1 and (requested, transport) == ("native", "shm")
    if (
        transport not in ("", session.backend.transport)
        and session.backend.name != "single"
        and not has_nobody_to_share_with
    ):
        session.close()
        raise UnsupportedError(
            f"{TRANSPORT}={transport}, but the backend {session.backend.name} runs over {session.backend.transport} "
            "here: unset it, or choose a backend and a launcher that have it"
        )
    _process.session = session
    if RECORD in environ and _process.recorder is None:
        _process.recorder = _recorder(session, environ, began)


def _recorder(session: Session, environ: Mapping[str, str], began: float) -> Recorder:
    """What `dualdist compare` set the variables for."""
    from dualdist import recording

    topology, backend = session.topology, session.backend
    path = Path(environ[RECORD], f"rank-{topology.rank}.json")
    plan = recording.Plan(path, int(environ[RECORD_WARMUP]), int(environ[RECORD_STEPS]))
    place = recording.place_of(topology, backend.name, backend.transport, session.device)
    return recording.Recorder(plan, {"rank": topology.rank, **place}, session.device, began)


def recorded(optimizer: torch.optim.Optimizer) -> None:
    """The wrapped optimizer's steps are recorded, where `dualdist compare` runs this program."""
    if _process.recorder is not None:
        _process.recorder.watch(optimizer)


def export(values: Mapping[str, str]) -> None:
    """Set variables that a launcher would set, for programs that read them; the next init() does not see them."""
    if not any(name in os.environ for name in values):
        os.environ.update(values)
        _process.exported = tuple(values)


def shutdown() -> None:
    """Leave the job; see dualdist.api.shutdown."""
    session = current()
    if _process.recorder is not None:
        _process.recorder.finish()
    _process.session = None
    _process.was_shut_down = True
    try:
        for ending in session.endings:
            ending()
    finally:
        session.close()


def built_with() -> dict[str, int]:
    """What the backend in use is made of, or native before init(): 0 or a version, or 1, for gloo, mpi and nccl."""
    if is_open():
        return current().backend.built_with()
    from dualdist.backends import native

    return native.built_with()


def new_group(ranks: Sequence[int]) -> Group:
    """See dualdist.api.new_group."""
    from dualdist.collectives import in_step
    from dualdist.group import Group
    from dualdist.watch import Watch

    session = current()
    members = sorted(whole(ranks, "ranks"))
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(session.topology.size)):
        raise UsageError(f"ranks {members}: expected different ranks of this job, 0 to {session.topology.size - 1}")
    world = session.world
    name = world.next_name("new_group")
    backend = in_step(world, "new_group", name, {"ranks": members}, lambda line: line.subgroup(members, name))
    place, timeout_s = backend.rank, backend.timeout_s
    mailbox = _mailbox(session.store, f"{session.key}/{name}", session.hosts, members, place, timeout_s)
    group = Group(backend, Watch(world.watch.roll, members), mailbox=mailbox)
    session.groups.append(group)
    return group


def remove_group(group: Group) -> None:
    """See dualdist.api.remove_group."""
    from dualdist.collectives import in_step

    session = current()
    if group not in session.groups:
        raise UsageError("remove_group takes a group that dd.new_group made in this session, once")
    world = session.world
    ranks = {"ranks": list(group.ranks)}
    in_step(world, "remove_group", world.next_name("remove_group"), ranks, lambda line: group.close())
    session.groups.remove(group)


def checked_choice(value: str, choices: tuple[str, ...], what: str, variable: str) -> str:
    """The value, if it is one of the choices."""
    if value not in choices:
        valid = ", ".join(repr(choice) for choice in choices if choice)
        raise UsageError(f"{what} {value!r}: expected one of {valid} (given to dd.init() or in {variable})")
    return value


def _open(requested: str, transport: str, environ: MutableMapping[str, str], session: str, timeout_s: float) -> Session:
    topology = detect(environ)
    group = _existing_group()
    if group is not None and requested in ("auto", "native"):
        return _adopt(topology, group, transport, environ, session, timeout_s)
    saved = _saved_choice(topology, transport, environ) if requested == "auto" else None
    if saved is None:
        return _open_by(requested, topology, transport, environ, session, timeout_s)
    try:
        opened = _open_by(saved.backend, topology, saved.transport, environ, session, timeout_s)
    except DualdistError:
        _tell_choice(topology, f"{_told(saved, environ)}; it fails here")
        raise
    ran = opened.backend.transport
    instead = "" if ran == saved.transport else f"; here it runs over {ran} instead"
    _tell_choice(topology, f"{_told(saved, environ)}{instead}")
    return opened


def _open_by(
    requested: str,
    topology: Topology,
    transport: str,
    environ: MutableMapping[str, str],
    session: str,
    timeout_s: float,
) -> Session:
    name = chosen_backend(requested, topology)
    if name == "mpi":
        from dualdist.backends import mpi

        return _open_on_mpi(mpi.start(topology, environ, timeout_s), topology, environ, session, timeout_s)
    if name == "horovod" and controller(transport, topology, environ) == "mpi":
        return _open_horovod_on_mpi(topology, environ, session, timeout_s)
    return _open_over_store(name, topology, transport, environ, session, timeout_s)


def chosen_backend(requested: str, topology: Topology) -> str:
    """ "native", "horovod", "mpi" or "single", from what was asked for and how the ranks were started."""
    if requested != "auto":
        return requested
    if topology.launcher in HOROVODS_OWN:
        return "horovod"
    if topology.launcher in MPIS_OWN:
        from dualdist.backends import horovod

        has_mpi4py = find_spec("mpi4py") is not None
        return over_mpi(horovod.is_built_with_mpi(), has_mpi4py, has_gpu=_device(None).type == "cuda")
    return "single" if topology.launcher == "none" else "native"


def _saved_choice(topology: Topology, transport: str, environ: Mapping[str, str]) -> Saved | None:
    """The saved choice that "auto" stands for, with the transport that was asked for or none."""
    from dualdist import choices

    def device() -> tuple[str, int]:
        import torch

        from dualdist.recording import name_of

        return name_of(_device(None)), torch.get_num_threads()

    if not choices.can_count(topology):
        return None
    try:
        found = choices.of_job(choices.load(choices.path_of(environ)), topology, device)
    except UsageError as error:  # a file that the program's user may not know of ends no training
        _tell_choice(topology, str(error))
        return None
    if found is None or transport not in ("", found.transport):
        return None
    lack = _lack(found)
    if lack is not None:
        _tell_choice(topology, f"{_told(found, environ)}; not taken: {lack}")
        return None
    return found


def _lack(saved: Saved) -> str | None:
    """Why this Python cannot have the choice, which the user's other one has made; None where it can."""
    if saved.backend == "mpi":
        return None if find_spec("mpi4py") is not None else "mpi4py is not installed"
    if saved.backend == "horovod":
        from dualdist.backends import horovod

        try:
            horovod.load()
        except BackendUnavailableError as error:
            return str(error)
        if saved.transport == "mpi" and not horovod.is_built_with_mpi():
            return "this Horovod was built without MPI"
    return None


def _told(saved: Saved, environ: Mapping[str, str]) -> str:
    from dualdist import choices

    return f"{saved} ({choices.path_of(environ)}; {BACKEND} goes before it)"


def _tell_choice(topology: Topology, said: str) -> None:
    """The first rank tells, once."""
    if topology.rank == 0 and not _process.has_told_choice:
        _process.has_told_choice = True
        print(f"dualdist: {said}", file=sys.stderr, flush=True)


def over_mpi(has_horovod: bool, has_mpi4py: bool, *, has_gpu: bool) -> str:
    """The backend under mpirun, by whether there is a Horovod with MPI, an mpi4py, and a GPU.

    Who types mpirun wants MPI to move tensors, as it knows the machine's network: by Horovod where one was built for
    that, else by mpi4py. GPUs are for native: NCCL reaches them, where most MPIs go through the host's memory.
    """
    if has_horovod:
        return "horovod"
    return "mpi" if has_mpi4py and not has_gpu else "native"


def controller(transport: str, topology: Topology, environ: MutableMapping[str, str]) -> str:
    """ "mpi" or "gloo", on which Horovod's ranks coordinate: as asked for, else MPI where the launcher started it."""
    asked = transport if transport in ("gloo", "mpi") else environ.get(HOROVOD_CONTROLLER, "").lower()
    if asked == "mpi" and not topology.mpi and topology.size > 1:
        raise UnsupportedError(
            f"Horovod over MPI was asked for ({TRANSPORT} or {HOROVOD_CONTROLLER} is mpi), but MPI was not started "
            f"by {topology.launcher}: use mpirun, horovodrun --mpi or srun --mpi=pmix, or set DUALDIST_TRANSPORT=gloo"
        )
    if asked in ("gloo", "mpi"):
        return asked
    if not topology.mpi:
        return "gloo"
    from dualdist.backends import horovod

    return "mpi" if horovod.is_built_with_mpi() else "gloo"


def _existing_group() -> tuple[int, int] | None:
    """Rank and size in torch.distributed's default group, if the program has set one up."""
    if "torch.distributed" not in sys.modules:
        return None
    from dualdist.backends import native

    return native.existing_group()


def _adopt(
    topology: Topology,
    group: tuple[int, int],
    transport: str,
    environ: MutableMapping[str, str],
    session: str,
    timeout_s: float,
) -> Session:
    """Use the program's own process group. Where no launcher is seen, the group says how many ranks there are."""
    from dualdist.backends import native

    rank, size = group
    if topology.launcher == "none":
        topology = Topology(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            node=0,
            nodes=1,
            launcher="none",
            source="torch.distributed's default group",
            inferred=frozenset({"local_rank", "local_size", "node", "nodes"}),
        )
    elif (rank, size) != (topology.rank, topology.size):
        raise TopologyError(
            f"torch.distributed's default group says rank {rank} of {size}, but {topology.source} say "
            f"rank {topology.rank} of {topology.size}: set the group up with the launcher's numbers, or not at all"
        )
    backend, store = native.adopt(_device(None), timeout_s)
    places = _places_by(backend, topology, transport, environ)
    if transport != "gloo":
        backend.share_memory([place.host for place in places])
    topology = placed(topology, places)
    return _session(backend, store, session, topology, places, timeout_s)


def _open_horovod_on_mpi(
    topology: Topology, environ: MutableMapping[str, str], session: str, timeout_s: float
) -> Session:
    from dualdist import mpi_world
    from dualdist.backends import horovod

    if mpi_world.has_ended():
        raise UnsupportedError(
            "MPI was finished in this process, by a session on another backend, and cannot start again: "
            f"start a new job, or set {TRANSPORT}=gloo"
        )
    backend = horovod.start_on_mpi(topology, environ, _device(None), timeout_s)
    if (backend.rank, backend.size) != (topology.rank, topology.size):
        backend.close()
        raise TopologyError(
            f"{topology.source} say rank {topology.rank} of {topology.size}, but Horovod's MPI says "
            f"rank {backend.rank} of {backend.size}: this Horovod was built with another MPI than the mpirun that "
            "started it; put that MPI's mpirun first on PATH, build again with `dualdist install-horovod --force`, "
            "or set DUALDIST_TRANSPORT=gloo"
        )
    return _open_on_mpi(backend, topology, environ, session, timeout_s)


def _open_on_mpi(
    backend: Backend, topology: Topology, environ: MutableMapping[str, str], session: str, timeout_s: float
) -> Session:
    """The session on a backend that runs over MPI, where ranks need no store to meet, but to tell who is missing."""
    places = _places_by(backend, topology, "", environ)
    topology = placed(topology, places)
    if _process.store is None and topology.size > 1:
        _process.store = _store_over(backend, topology, environ, Deadline(timeout_s))
    return _session(backend, _process.store, session, topology, places, timeout_s)


def _store_over(backend: Backend, topology: Topology, environ: MutableMapping[str, str], deadline: Deadline) -> Store:
    """A store that rank 0 serves, found over a backend that runs already."""
    from dualdist import network
    from dualdist.backends import native_store
    from dualdist.moves import broadcast_object

    host = network.host_identity(environ)
    if topology.rank == 0:
        listener = network.listen(0, loopback_only=topology.nodes == 1)
        port = listener.getsockname()[1]
        broadcast_object(backend, network.Invitation.of(host, port, one_node=topology.nodes == 1), 0, STORE)
        return native_store.connect(network.LOOPBACK, port, listener, deadline)
    invitation = broadcast_object(backend, network.Invitation("", (), 0), 0, STORE)
    return native_store.connect(invitation.answering_address(host, deadline), invitation.port, None, deadline)


def _session(
    backend: Backend, store: Store | None, key: str, topology: Topology, places: Sequence[Place], timeout_s: float
) -> Session:
    """The session on a backend that runs.

    The group of all ranks, whose failing operations name the ranks that are missing, has a line of its own: torch's
    default group is the program's, which may use it while ours is busy in a thread.
    """
    from dualdist.group import Group
    from dualdist.watch import RollCall, Watch

    if topology.size == 1:
        store = None
    hosts = tuple(place.host for place in places)
    roll = None if store is None else RollCall(store, backend.rank, f"{key}/roll")
    line = backend.channel("operations")
    mailbox = _mailbox(store, f"{key}/mailbox", hosts, backend.ranks, backend.rank, timeout_s)
    world = Group(line, Watch(roll, backend.ranks), backend, mailbox)
    return Session(world, topology, _device(topology), timeout_s, hosts, store, key)


def _mailbox(
    store: Store | None, key: str, hosts: Sequence[int], ranks: Sequence[int], place: int, timeout_s: float
) -> Mailbox | None:
    """Where these ranks exchange messages, if they share a host and its memory; the members call this."""
    if store is None or place < 0 or len(ranks) == 1 or len({hosts[rank] for rank in ranks}) > 1:
        return None
    from dualdist.mailbox import open_mailbox

    try:
        return open_mailbox(store, key, ranks, place, Deadline(timeout_s))
    except BackendUnavailableError:
        return None  # they exchange them over the backend


def _open_over_store(
    name: str,
    topology: Topology,
    transport: str,
    environ: MutableMapping[str, str],
    session: str,
    timeout_s: float,
) -> Session:
    """Open the backend where the ranks first meet at a store; a job of one rank needs none."""
    if name == "single":
        from dualdist.backends.single import SingleBackend

        return _session(SingleBackend(), None, session, topology, [Place(0, 0)], timeout_s)
    from dualdist import rendezvous
    from dualdist.backends import native, native_store

    deadline = Deadline(timeout_s)
    if topology.size == 1:
        store, places, interface = None, [Place(0, 0)], None
    else:
        met = rendezvous.meet(
            topology, environ, session, name, native_store.connect, _process.store, deadline, transport
        )
        store, places, interface = met.store, met.places, met.interface
        _process.store = store
    topology = placed(topology, places)
    device = _device(topology)
    backend: Backend
    if name == "native":
        hosts = () if transport == "gloo" else [place.host for place in places]
        backend = native.start(
            topology.rank, topology.size, store, session, interface, environ, device, timeout_s, hosts
        )
    else:
        from dualdist.backends import horovod

        backend = horovod.start_on_gloo(topology, places, store, session, interface, environ, device, timeout_s)
    return _session(backend, store, session, topology, places, timeout_s)


def _places_by(backend: Backend, topology: Topology, transport: str, environ: MutableMapping[str, str]) -> list[Place]:
    """Everybody's place, as the ranks find it when they compare what they know, over a backend that runs already."""
    from dualdist.moves import allgather_object

    mine = report_of(topology, host_identity(environ), backend.name, transport)
    return settle([Report.loads(text) for text in allgather_object(backend, mine.dumps(), "dualdist.places")])


def _device(topology: Topology | None) -> torch.device:
    """This rank's GPU, made the current one, or the CPU; without a topology only the kind of device counts.

    A launcher that shows each rank one GPU of its own makes that GPU number 0 on every rank.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if topology is None:
        return torch.device("cuda")
    count = torch.cuda.device_count()
    index = 0 if count == 1 else topology.local_rank
    if index >= count:
        raise TopologyError(
            f"local rank {topology.local_rank} of {topology.local_size} sees {count} GPUs: start at most one rank "
            "a GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

"""hvd.init() and hvd.shutdown(), and what a process may ask in between."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from dualdist import session
from dualdist.collectives.group import Group
from dualdist.collectives.objects import allgather_object
from dualdist.errors import UsageError
from dualdist.hvd.face import KEY, CrossRank, HorovodSession, current
from dualdist.hvd.process_sets import DYNAMIC, ProcessSet, global_process_set, register
from dualdist.hvd.timeline import HorovodTimeline
from dualdist.rendezvous.backend_selection import BACKEND
from dualdist.utils.temporary_env import temporary_variables

TIMELINE = "HOROVOD_TIMELINE"
MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
WAIT_FOR_START = "DYNAMIC"  # as a timeline: none until start_timeline()


def init(comm: Sequence[int] | Any | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job; does nothing where this process has joined. Every process that was started calls this.

    `comm` are the ranks to form a job with, or an mpi4py communicator over them: each of these ranks passes the same,
    and sees them numbered from 0. `process_sets` are made at once; with "dynamic" they can be added later.
    """
    is_dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    if is_dynamic:
        process_sets = []
    elif isinstance(process_sets, str):
        raise UsageError(f"process_sets={process_sets!r}: expected process sets, or 'dynamic'")
    if session.is_open() and KEY in session.current().extras:
        if any(given.process_set_id is None for given in process_sets or ()):
            raise UsageError("hvd.init() has been called; add process sets by hvd.add_process_set()")
        return
    wanted = _ranks_of(comm)
    if not session.is_open():
        with temporary_variables(
            os.environ, {DYNAMIC: "1"} if is_dynamic else {}
        ):  # a real Horovod reads it when it starts
            session.init(os.environ.get(BACKEND) or "native")
    try:
        _open_face(wanted, list(process_sets or ()), is_dynamic=is_dynamic or os.environ.get(DYNAMIC) == "1")
    except BaseException:
        shutdown()
        raise


def _open_face(wanted: list[int], process_sets: Sequence[ProcessSet], *, is_dynamic: bool) -> None:
    opened = session.current()
    base = _base(opened.world, wanted)
    seats = allgather_object(base, (opened.topology.node_rank, opened.topology.local_rank))
    seat = _seat(base.rank, seats)
    face = HorovodSession(base, seat, is_dynamic, {0: base})
    _export(base, seat)
    opened.extras[KEY] = face
    global_process_set.process_set_id, global_process_set.ranks = 0, list(range(base.size))
    for process_set in process_sets:
        if process_set.ranks is None:
            process_set.ranks = sorted(_ranks_of(process_set.mpi_comm))
        register(face, process_set)
    path = os.environ.get(TIMELINE, "")
    if path and path != WAIT_FOR_START:
        start_timeline(path, os.environ.get(MARK_CYCLES) == "1")


def shutdown() -> None:
    """Leave the job; hvd.init() may follow."""
    if not session.is_open():
        return
    face: HorovodSession | None = session.current().extras.pop(KEY, None)
    try:
        if face is not None:
            _close_face(face)
    finally:
        session.shutdown()


def _close_face(face: HorovodSession) -> None:
    for process_set in face.sets.values():
        process_set._invalidate()
    global_process_set.ranks = []
    if face.timeline is not None:
        face.timeline.close()


def _ranks_of(comm: Sequence[int] | Any | None) -> list[int]:
    """The job's ranks that are meant; none for all."""
    if comm is None:
        return []
    if isinstance(comm, Iterable):
        ranks = list(comm)
        if any(not isinstance(rank, int) for rank in ranks) or len(set(ranks)) < len(ranks):
            raise UsageError(f"comm={ranks!r}: expected different ranks, or an mpi4py communicator")
        return ranks
    if not hasattr(comm, "Get_group"):
        raise UsageError(f"comm={comm!r}: expected different ranks, or an mpi4py communicator")
    from dualdist.backends.mpi.world import ranks_in_world

    return ranks_in_world(comm)


def _base(world: Group, wanted: list[int]) -> Group:
    """The group of the wanted ranks. Other ranks may want others: all find out, and make all groups together."""
    everybodys = allgather_object(world, sorted(wanted) or list(range(world.size)))
    mine = everybodys[world.rank]
    if world.rank not in mine:
        raise UsageError(f"comm={wanted}: rank {world.rank} is to form a job with these ranks, and is none of them")
    if any(rank >= world.size or everybodys[rank] != mine for rank in mine):
        raise UsageError(f"comm={mine}: not all of these ranks passed the same: {everybodys}")
    found = world
    for ranks in sorted({tuple(ranks) for ranks in everybodys}):
        if len(ranks) < world.size:
            group = session.new_group(ranks)
            found = group if group.is_member else found
    return found


def _seat(rank: int, seats: Sequence[tuple[int, int]]) -> CrossRank:
    """Where this rank sits among (node, local rank) of all."""
    node = seats[rank][0]
    neighbours = sorted((local, place) for place, (other, local) in enumerate(seats) if other == node)
    local_rank = [place for _, place in neighbours].index(rank)
    sizes = Counter(other for other, _ in seats)
    nodes = [other for other in sorted(sizes) if sizes[other] > local_rank]
    return CrossRank(local_rank, sizes[node], nodes.index(node), len(nodes), len(set(sizes.values())) == 1)


def _export(base: Group, seat: CrossRank) -> None:
    """Horovod's launcher sets these variables, and scripts read them; under other launchers they are set here."""
    values = {
        "RANK": base.rank,
        "SIZE": base.size,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_SIZE": seat.local_size,
        "CROSS_RANK": seat.cross_rank,
        "CROSS_SIZE": seat.cross_size,
    }
    session.export_env({f"HOROVOD_{name}": str(value) for name, value in values.items()})


def is_initialized() -> bool:
    """Whether this process is between hvd.init() and hvd.shutdown()."""
    return session.is_open() and KEY in session.current().extras


def rank() -> int:
    """0 <= rank < size; unique in the job."""
    return current().rank


def size() -> int:
    """The number of ranks in the job."""
    return current().base.size


def local_rank() -> int:
    """0 <= local_rank < local_size; unique on this node."""
    return current().seat.local_rank


def local_size() -> int:
    """The number of ranks on this node."""
    return current().seat.local_size


def cross_rank() -> int:
    """This node's place among those that have a rank of this local rank."""
    return current().seat.cross_rank


def cross_size() -> int:
    """The number of nodes that have a rank of this local rank."""
    return current().seat.cross_size


def is_homogeneous() -> bool:
    """Whether all nodes have equally many ranks."""
    return current().seat.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a Chrome trace to a file from now on, on rank 0; every rank may call this."""
    face = current()
    stop_timeline()
    if face.rank == 0:
        face.timeline = HorovodTimeline(file_path, mark_cycles=mark_cycles)
        for group in face.groups.values():
            face.observe(group)


def stop_timeline() -> None:
    """Complete the trace, if one is being written."""
    face = current()
    if face.timeline is not None:
        face.timeline.close()
        face.timeline = None
    for group in face.groups.values():
        face.observe(group)


def _built(what: str) -> bool:
    """Whether the backend in use has it; before hvd.init(), whether native has."""
    return bool(session.built_with()[what])


def mpi_threads_supported() -> bool:
    """Whether other MPI libraries may be used beside; ValueError where MPI is not in use."""
    if not mpi_enabled():
        raise UsageError("MPI is not in use here: Horovod over MPI is, under mpirun with DUALDIST_BACKEND=horovod")
    return True


def mpi_enabled() -> bool:
    """Whether MPI carries the operations."""
    return session.is_open() and session.current().backend.transport == "mpi"


def mpi_built() -> bool:
    """Whether the backend in use has MPI; native has none."""
    return _built("mpi")


def gloo_enabled() -> bool:
    """Whether Gloo carries the operations on CPU tensors."""
    return session.is_open() and session.current().backend.transport != "mpi"


def gloo_built() -> bool:
    """Whether the backend in use has Gloo."""
    return _built("gloo")


def nccl_built() -> int:
    """The version of the NCCL that the backend in use has, such as 21805, or 0."""
    return session.built_with()["nccl"]


def ddl_built() -> bool:
    """IBM's DDL: never."""
    return False


def ccl_built() -> bool:
    """Intel's oneCCL: never."""
    return False


def cuda_built() -> bool:
    """Whether torch has CUDA."""
    import torch

    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch has ROCm."""
    import torch

    return torch.version.hip is not None

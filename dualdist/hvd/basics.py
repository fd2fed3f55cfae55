"""hvd.init(), hvd.shutdown(), the job's ranks, build features and timeline (horovod.common.basics)."""

import inspect
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dualdist import session, trace
from dualdist.collectives.broadcast_state import allgather_object
from dualdist.collectives.group import Group
from dualdist.errors import UsageError
from dualdist.hvd.common import ccl_built as ccl_built
from dualdist.hvd.common import ddl_built as ddl_built
from dualdist.hvd.common import gloo_built as gloo_built
from dualdist.hvd.common import mpi_built as mpi_built
from dualdist.hvd.common import nccl_built as nccl_built
from dualdist.hvd.process_sets import (
    DYNAMIC,
    KEY,
    CrossRank,
    HorovodSession,
    ProcessSet,
    assign_numbers,
    current,
    find_number,
    global_process_set,
    register,
)
from dualdist.hvd.timeline import HorovodTimeline
from dualdist.rendezvous.backend_selection import BACKEND
from dualdist.utils.variables import temporary_variables

TIMELINE = "HOROVOD_TIMELINE"
MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
WAIT_FOR_START = "DYNAMIC"  # a value of HOROVOD_TIMELINE: no trace before start_timeline()


def init(comm: Sequence[int] | Any | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job; every process calls this. Does nothing if this process has joined.

    Args:
        comm: ranks to form a job with, or an mpi4py communicator over them; the same on each of these ranks, which are
            then numbered from 0. If None, all ranks.
        process_sets: sets to register; those of ranks are the same on each rank, one of a communicator may be this
            rank's part of a split one. With "dynamic" they can be added later.

    Raises:
        ValueError: an argument is invalid, or the ranks passed different `comm`; or a set is given twice, in which case
            the process has joined, and may call this again with each set once.
        HorovodInternalError: the ranks cannot work together.
    """
    is_dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    if isinstance(process_sets, str) and not is_dynamic:
        raise UsageError(f"process_sets={process_sets!r}: expected process sets, or 'dynamic'")
    given = [] if isinstance(process_sets, str) else list(process_sets or ())
    for process_set in given:
        if process_set.ranks is None:
            process_set.ranks = sorted(_ranks_of(process_set.mpi_comm))
    if is_initialized():
        assign_numbers(current(), given)
        return
    ranks = _ranks_of(comm)
    if not session.is_open():
        # A real Horovod reads the variable when it starts.
        with temporary_variables(os.environ, {DYNAMIC: "1"} if is_dynamic else {}):
            # Horovod leaves torch.distributed's default group to the program.
            session.add_observer(trace.ASKED_BY_VARIABLES)
            session.init(os.environ.get(BACKEND) or "native", sets_default_group=False)
    try:
        _open_job(ranks, given, is_dynamic=is_dynamic or os.environ.get(DYNAMIC) == "1")
    except BaseException:
        shutdown()
        raise
    global_process_set.mpi_comm = comm if hasattr(comm, "Get_group") else None
    assign_numbers(current(), given)


def _open_job(ranks: list[int], process_sets: Sequence[ProcessSet], *, is_dynamic: bool) -> None:
    opened = session.current()
    base = _base_group(opened.world, ranks)
    location = (opened.topology.node_rank, opened.topology.local_rank)
    everyones = allgather_object(base, (location, [tuple(each.ranks or ()) for each in process_sets]))
    position = _cross_rank(base.rank, [location for location, _ in everyones])
    global_process_set.ranks = list(range(base.size))
    job = HorovodSession(base, position, is_dynamic, {0: base}, {0: global_process_set})
    _export(base, position)
    opened.extras[KEY] = job
    for sets in itertools.zip_longest(*(given for _, given in everyones)):
        for members in sorted({members for members in sets if members}):
            if find_number(job, members) is None:
                register(job, ProcessSet(members))
    path = os.environ.get(TIMELINE, "")
    if path and path != WAIT_FOR_START:
        start_timeline(path, os.environ.get(MARK_CYCLES) == "1")


def shutdown() -> None:
    """Leave the job; hvd.init() may follow."""
    if not session.is_open():
        return
    job: HorovodSession | None = session.current().extras.pop(KEY, None)
    try:
        if job is not None:
            for process_set in job.sets.values():
                process_set.process_set_id = None
            global_process_set.process_set_id, global_process_set.ranks = 0, []
            job.set_timeline(None)
    finally:
        session.shutdown()


def _ranks_of(comm: Sequence[int] | Any | None) -> list[int]:
    """Return the ranks of the job in `comm`; none means all."""
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


def _base_group(world: Group, ranks: list[int]) -> Group:
    """Return the group of `ranks`. Other ranks may want other groups: all exchange theirs, and create all groups."""
    wanted = allgather_object(world, sorted(ranks) or list(range(world.size)))
    own = wanted[world.rank]
    if world.rank not in own:
        raise UsageError(f"comm={ranks}: rank {world.rank} is to form a job with these ranks, and is none of them")
    if any(rank >= world.size or wanted[rank] != own for rank in own):
        raise UsageError(f"comm={own}: not all of these ranks passed the same: {wanted}")
    found = world
    for members in sorted({tuple(members) for members in wanted}):
        if len(members) < world.size:
            group = session.new_group(members)
            found = group if group.is_member else found
    return found


def _cross_rank(rank: int, positions: Sequence[tuple[int, int]]) -> CrossRank:
    """Return this rank's position, given (node rank, local rank) of all ranks."""
    node = positions[rank][0]
    on_node = sorted((local, other) for other, (other_node, local) in enumerate(positions) if other_node == node)
    local_rank = [other for _, other in on_node].index(rank)
    sizes = Counter(other_node for other_node, _ in positions)
    nodes = [other_node for other_node in sorted(sizes) if sizes[other_node] > local_rank]
    return CrossRank(local_rank, sizes[node], nodes.index(node), len(nodes), len(set(sizes.values())) == 1)


def _export(base: Group, position: CrossRank) -> None:
    """Set the variables of Horovod's launcher, which scripts read, if another launcher started the ranks."""
    values = {
        "RANK": base.rank,
        "SIZE": base.size,
        "LOCAL_RANK": position.local_rank,
        "LOCAL_SIZE": position.local_size,
        "CROSS_RANK": position.cross_rank,
        "CROSS_SIZE": position.cross_size,
    }
    session.export_env({f"HOROVOD_{name}": str(value) for name, value in values.items()})


def is_initialized() -> bool:
    """Return True between hvd.init() and hvd.shutdown()."""
    return session.is_open() and KEY in session.current().extras


def rank() -> int:
    """Return this process's rank in the job, 0 <= rank < size."""
    return current().base.rank


def size() -> int:
    """Return the number of ranks in the job."""
    return current().base.size


def local_rank() -> int:
    """Return this process's rank on its node, 0 <= local_rank < local_size."""
    return current().position.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current().position.local_size


def cross_rank() -> int:
    """Return this node's index among the nodes that have a rank of this local rank."""
    return current().position.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a rank of this local rank."""
    return current().position.cross_size


def is_homogeneous() -> bool:
    """Return True if all nodes have the same number of ranks."""
    return current().position.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a Chrome trace from now on, on rank 0; every rank may call this.

    Args:
        file_path: of the trace.
        mark_cycles: show when the ranks exchange requests.
    """
    stop_timeline()
    if current().base.rank == 0:
        current().set_timeline(HorovodTimeline(file_path, mark_cycles=mark_cycles))


def stop_timeline() -> None:
    """Complete the trace that start_timeline() began, if any."""
    current().set_timeline(None)


def mpi_threads_supported() -> bool:
    """Return True: other MPI libraries may be used in this process. ValueError if MPI is not in use."""
    if not mpi_enabled():
        raise UsageError("MPI is not in use here: Horovod over MPI is, under mpirun with DUALDIST_BACKEND=horovod")
    return True


def mpi_enabled() -> bool:
    """Return True if MPI is the transport."""
    return session.is_open() and session.current().backend.transport == "mpi"


def gloo_enabled() -> bool:
    """Return True if MPI is not the transport of CPU tensors."""
    return session.is_open() and session.current().backend.transport != "mpi"


def cuda_built() -> bool:
    """Return True if torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if torch was built with ROCm."""
    return torch.version.hip is not None


class HorovodBasics:
    """The functions of this module as methods, for programs that use horovod.common.basics; nothing is loaded."""

    def __init__(self, pkg_path: str, *args: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        found = globals().get(name)
        if not inspect.isfunction(found) or name.startswith("_"):
            raise AttributeError(name)
        return found

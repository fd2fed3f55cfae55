"""Start and end of MPI in this process by mpi4py, which no other module imports.

MPI can start once in a process. Started for one broadcast it ends right after it; started for a backend, at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualdist.errors import BackendUnavailableError, RendezvousError, TopologyError, UnsupportedError
from dualdist.topology import Topology
from dualdist.utils.deadline import STDERR, Deadline, call_within, wait_until_read
from dualdist.utils.variables import temporary_variables

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Open MPI without its own mpirun is a job of one rank, which aborts if a relocated installation does not find the
# daemon. With this it starts, and the session detects the wrong size under another MPI's mpirun.
SINGLETON_VARIABLES = {"OMPI_MCA_ess_singleton_isolated": "1"}
# Set for the one broadcast of the rendezvous: with its OFI transport for one-sided operations, Open MPI 4.1.8 takes a
# second to finish.
BROADCAST_VARIABLES = {"OMPI_MCA_btl": "^ofi", **SINGLETON_VARIABLES}
# In /proc/self/maps "(deleted)" follows if the name is removed.
MPICH_MEMORY = re.compile(r"/dev/shm/mpich_shm_\w+$", re.MULTILINE)

WITHOUT_MPI = "or choose a rendezvous without MPI: set MASTER_ADDR and MASTER_PORT, or DUALDIST_RENDEZVOUS=file:///a/shared/folder/name"


def broadcast_text(text: str | None, topology: Topology, environ: MutableMapping[str, str], deadline: Deadline) -> str:
    """Return rank 0's text on every rank of MPI_COMM_WORLD; all of them call this.

    Raises TopologyError if MPI's ranks are not those of the launcher's variables. MPI is finished here if it is started
    here, so that a rank that is lost later cannot leave the others in MPI_Finalize.
    """

    def broadcast() -> str:
        with _world(topology, environ) as world:
            check_world(world.Get_rank(), world.Get_size(), topology)
            received: str = world.bcast(text, root=0)
        return received

    return call_within(deadline.left_s(), broadcast, lambda: start_timeout(topology, "MPI", deadline.timeout_s))


def start_timeout(topology: Topology, where: str, timeout_s: float) -> RendezvousError:
    """Return the error of a start of MPI or Horovod that did not end in time."""
    return RendezvousError(
        f"rank {topology.rank} waited {timeout_s:g} s in {where} for all {topology.size} ranks: "
        "did one of them end, or never call dd.init()?"
    )


def check_world(rank: int, size: int, topology: Topology) -> None:
    """Raise TopologyError if MPI's rank and size are not the launcher's."""
    if (rank, size) != (topology.rank, topology.size):
        raise TopologyError(
            f"the launcher says rank {topology.rank} of {topology.size} ({topology.source}), "
            f"but MPI says rank {rank} of {size}: "
            "this mpi4py uses another MPI than the mpirun that started it; put that MPI's mpirun first on PATH, "
            f"or install mpi4py for this MPI (that of PyPI takes the one that MPI4PY_LIBMPI names), {WITHOUT_MPI}"
        )


def start(topology: Topology, environ: MutableMapping[str, str]) -> Any:
    """Return mpi4py.MPI, after starting MPI for the rest of the process unless it runs."""
    api = _load(f"the backend mpi needs mpi4py ({{}}): pip install mpi4py, where {topology.launcher}'s MPI is on PATH")
    if api.Is_finalized():
        raise UnsupportedError(
            "MPI was finished in this process, by a session on another backend, and cannot start again: start a new job"
        )
    if not api.Is_initialized():
        _init(api, environ, SINGLETON_VARIABLES)
        atexit.register(_end, api)
        if "MPICH" in api.Get_library_version():
            _unlink_shared_memory(api.COMM_WORLD)
    check_world(api.COMM_WORLD.Get_rank(), api.COMM_WORLD.Get_size(), topology)
    return api


def _unlink_shared_memory(world: Intracomm) -> None:
    """Unlink MPICH 5's shared memory, which is named until MPI_Finalize, so that killed ranks leave none behind."""
    world.Barrier()  # maps it
    world.Barrier()  # all ranks have mapped it
    for name in set(MPICH_MEMORY.findall(Path("/proc/self/maps").read_text())):
        with contextlib.suppress(OSError):  # another rank of this host was first
            os.unlink(name)


def end_within(timeout_s: float, api: Any) -> None:
    """Exit after `timeout_s` at the latest, in a process that exits without closing its session; for atexit."""
    _abort_if_failed(api)

    def give_up() -> None:
        time.sleep(timeout_s)
        print(f"dualdist: no answer for {timeout_s:g} s; this process ends without MPI", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=give_up, name="dualdist-exit", daemon=True).start()


def end_beside_calls(timeout_s: float, api: Any) -> None:
    """Exit as end_within() does, beside threads that are still in MPI, in calls that were given up; for atexit.

    They poll memory that MPI_Finalize unmaps: one that faults by that stops there, instead of ending the process by
    SIGSEGV after all its work is done. mpirun would also fail a job that ends without MPI_Finalize.
    """
    end_within(timeout_s, api)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGSEGV, ctypes.cast(libc.pause, ctypes.c_void_p))


def _end(api: Any) -> None:
    """Finish MPI, which waits for all ranks; mpirun ends the job if one is lost."""
    if not api.Is_finalized():
        _abort_if_failed(api)
        api.Finalize()


def leave_to_launcher() -> None:
    """Do not finish MPI when this process exits, with an error code: its mpirun ends the job then."""
    atexit.unregister(_end)


def finish() -> None:
    """Finish MPI, if it runs, before another program takes this process over."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized():
        _end(module)


def _abort_if_failed(api: Any) -> None:
    """Abort the job if an exception ends this process, which would wait for the others in MPI_Finalize."""
    if getattr(sys, "last_value", None) is not None and not api.Is_finalized():
        sys.stdout.flush()
        sys.stderr.flush()
        wait_until_read(STDERR)  # MPICH's MPI_Abort kills the reader as well
        api.COMM_WORLD.Abort(1)


@contextlib.contextmanager
def _world(topology: Topology, environ: MutableMapping[str, str]) -> Iterator[Intracomm]:
    """Yield MPI_COMM_WORLD; MPI is started and finished around the block unless it runs already."""
    api = _load(
        f"{topology.launcher} started the ranks, and they meet through MPI, for which mpi4py is needed ({{}}): "
        f"pip install mpi4py, {WITHOUT_MPI}"
    )
    if api.Is_finalized():
        raise RendezvousError(f"MPI was already finished in this process and cannot start again: {WITHOUT_MPI}")
    if api.Is_initialized():
        yield api.COMM_WORLD
        return
    _init(api, environ, BROADCAST_VARIABLES)
    try:
        yield api.COMM_WORLD
    finally:
        api.Finalize()


def _load(message: str) -> Any:
    """Import mpi4py.MPI without starting MPI; raise BackendUnavailableError(message.format(reason)) if impossible."""
    try:
        import mpi4py

        before = mpi4py.rc.initialize, mpi4py.rc.finalize
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = before
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(message.format(error)) from error
    return MPI


def _init(api: Any, environ: MutableMapping[str, str], settings: Mapping[str, str]) -> None:
    """Start MPI with multiple-thread support; variables that the user has set are kept."""
    with temporary_variables(environ, {name: value for name, value in settings.items() if name not in environ}):
        api.Init_thread(api.THREAD_MULTIPLE)


def ranks_in_world(comm: Any) -> list[int]:
    """Return the ranks in MPI_COMM_WORLD of an mpi4py communicator's processes, in its order."""
    from mpi4py import MPI

    group = comm.Get_group()
    return list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), MPI.COMM_WORLD.Get_group()))


def has_ended() -> bool:
    """Return True if MPI was finished in this process, so that it cannot start again."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_finalized())

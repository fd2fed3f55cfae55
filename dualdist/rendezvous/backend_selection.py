"""Choice of backend, transport and GPU: as requested, else as `dualdist compare --save-choice` saved, else by launcher.

"auto" takes a saved choice in a job like the one that was compared. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dualdist.backends import registry
from dualdist.backends.registry import AUTO, HOROVOD, MPI, NATIVE, SINGLE
from dualdist.errors import TopologyError, UsageError
from dualdist.topology import Topology
from dualdist.utils.saved_choices import (
    SavedChoice,
    choices_path,
    find_choice,
    format_threads,
    is_applicable,
    load_choices,
)
from dualdist.utils.suggest import require_choice

if TYPE_CHECKING:
    import torch

BACKEND = "DUALDIST_BACKEND"
TRANSPORT = "DUALDIST_TRANSPORT"
THROUGH_HOST = ("shm", "gloo", "mpi")  # transports that collective libraries of GPUs are none of
MPI_LAUNCHERS = ("mpirun", "mpiexec", "jsrun")

Print = Callable[[str], None]  # prints a line to the user


def check_choice(value: str, choices: Sequence[str], what: str, variable: str) -> None:
    """Raise UsageError if `value` is none of the choices."""
    owners = [name for name, transports in registry.backend_transports().items() if value in transports]
    if value not in choices and what == "backend" and owners:
        raise UsageError(
            f"{value!r} is a transport, of {' and '.join(owners)}, and no backend: type dd.init({owners[0]!r}), which "
            f"takes the fastest transport, or insist on this one by {TRANSPORT}={value}"
        )
    require_choice(value, choices, what, f" (given to dd.init() or in {variable})")


def select_device(topology: Topology | None, transport: str = "") -> torch.device:
    """Return this rank's accelerator, after making it the current one, or the CPU; only the type without a topology.

    A launcher that shows each rank only one GPU makes that GPU number 0 on every rank. Ranks share GPUs where a
    transport was requested that moves tensors through host memory: collective libraries want a GPU for each.
    """
    import torch

    from dualdist.backends.native.libraries import library_of
    from dualdist.utils import accelerator

    kind = accelerator.kind()
    if kind is None or topology is None:
        return torch.device(kind or "cpu")
    count = accelerator.count()
    is_shared = transport in THROUGH_HOST or not library_of(kind)
    index = topology.local_rank % count if is_shared or count == 1 else topology.local_rank
    if index >= count:
        raise TopologyError(
            f"local rank {topology.local_rank} of {topology.local_size} sees {count} GPUs: start at most one rank "
            f"a GPU, let ranks share them through host memory ({TRANSPORT}=gloo or mpi), or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    return accelerator.select(index)


def select_backend(requested: str, topology: Topology) -> str:
    """Return the name of the backend to open, from what was requested and how the ranks were started."""
    return default_backend(topology.launcher, _find_mpi_libraries)[0] if requested == AUTO else requested


def _find_mpi_libraries() -> tuple[bool, bool, bool]:
    from dualdist.backends.horovod import backend

    return backend.is_built_with_mpi(), find_spec("mpi4py") is not None, select_device(None).type != "cpu"


def default_backend(launcher: str, find_libraries: Callable[[], tuple[bool, bool, bool]]) -> tuple[str, str]:
    """Return the backend for ranks of a launcher, and why.

    mpirun's user expects MPI to move tensors, since it is configured for the network: through Horovod if built for
    MPI, else through mpi4py. On GPUs native is the default: NCCL reaches them, most MPIs stage through host memory.

    Args:
        find_libraries: says whether there are a Horovod with MPI, an mpi4py, and a GPU; called under MPI only.
    """
    if launcher == "horovodrun":
        return HOROVOD, "horovodrun is Horovod's launcher"
    if launcher == "none":
        return SINGLE, "no launcher started this process"
    if launcher not in MPI_LAUNCHERS:
        return NATIVE, f"{launcher} works with every backend, and native needs only torch"
    has_horovod, has_mpi4py, has_gpu = find_libraries()
    if has_horovod:
        return HOROVOD, f"{launcher} started MPI, and the installed Horovod was built with MPI"
    if has_gpu:
        return NATIVE, f"{launcher} started MPI, and torch sees GPUs, for which NCCL is used"
    if has_mpi4py:
        return MPI, f"{launcher} started MPI, and mpi4py is installed, but no Horovod with MPI"
    return NATIVE, f"{launcher} started MPI, and neither mpi4py nor a Horovod with MPI is installed"


def matching_choice(
    topology: Topology, transport: str, environ: Mapping[str, str], print_line: Print
) -> SavedChoice | None:
    """Return the saved choice for this job over `transport`, any if ""; print why one is not taken."""
    try:
        saved = load_choices(choices_path(environ)) if is_applicable(topology) else []
    except UsageError as error:  # not fatal: the user may not know of the file
        print_line(str(error))
        return None
    if not saved:
        return None
    import torch

    from dualdist.utils.accelerator import device_name

    threads = torch.get_num_threads()
    found = find_choice(saved, topology, device_name(select_device(None)), threads)
    if found is None or transport not in ("", found.transport):
        return None
    problem = _problem(found, threads)
    if problem is not None:
        print_line(f"{describe_choice(found, environ)}; not taken: {problem}")
        return None
    return found


def _problem(saved: SavedChoice, threads: int) -> str | None:
    """Return why a choice cannot be taken: a backend that this Python lacks, or another number of threads."""
    spec = registry.find(saved.backend)
    if spec is None or saved.transport not in spec.transports:
        return f"there is no backend {saved.backend!r} over {saved.transport!r} in this Python"
    compared = saved.conditions.threads
    if threads != compared:
        return (
            f"ranks had {format_threads(compared)} there, and have {format_threads(threads)} here: "
            f"OMP_NUM_THREADS={compared} takes it"
        )
    return spec.problem(saved.transport)


def describe_choice(saved: SavedChoice, environ: Mapping[str, str]) -> str:
    return f"{saved} ({choices_path(environ)}; {BACKEND} goes before it)"

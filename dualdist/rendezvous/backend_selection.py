"""Which backend and transport a job gets: by what was asked for, how it was started, and what was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dualdist.errors import BackendUnavailableError, TopologyError, UnsupportedError, UsageError
from dualdist.topology import Topology
from dualdist.utils.machine import device_name
from dualdist.utils.suggest import require_choice

if TYPE_CHECKING:
    import torch

    from dualdist.rendezvous.saved_choice import SavedChoice


def select_device(topology: Topology | None) -> torch.device:
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


BACKEND = "DUALDIST_BACKEND"
TRANSPORT = "DUALDIST_TRANSPORT"
HOROVOD_CONTROLLER = "HOROVOD_CONTROLLER"
BACKENDS = ("auto", "native", "horovod", "mpi")
TRANSPORTS = ("gloo", "shm", "mpi", "nccl")
# Launchers that belong to one backend; the others start ranks for any.
HOROVOD_LAUNCHERS = ("horovodrun",)
MPI_LAUNCHERS = ("mpirun", "mpiexec", "jsrun")

Print = Callable[[str], None]  # says a line to the user


def check_choice(value: str, choices: tuple[str, ...], what: str, variable: str) -> str:
    """The value, if it is one of the choices."""
    if value not in choices:  # of which one may be empty: nothing was asked for
        require_choice(value, filter(None, choices), what, f" (given to dd.init() or in {variable})")
    return value


def select_backend(requested: str, topology: Topology) -> str:
    """ "native", "horovod", "mpi" or "single", from what was asked for and how the ranks were started."""
    if requested != "auto":
        return requested
    if topology.launcher in HOROVOD_LAUNCHERS:
        return "horovod"
    if topology.launcher in MPI_LAUNCHERS:
        from dualdist.backends.horovod import backend

        has_mpi4py = find_spec("mpi4py") is not None
        return backend_under_mpi(backend.is_built_with_mpi(), has_mpi4py, has_gpu=select_device(None).type == "cuda")
    return "single" if topology.launcher == "none" else "native"


def backend_under_mpi(has_horovod: bool, has_mpi4py: bool, *, has_gpu: bool) -> str:
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
    from dualdist.backends.horovod import backend

    return "mpi" if backend.is_built_with_mpi() else "gloo"


def matching_choice(topology: Topology, transport: str, environ: Mapping[str, str], tell: Print) -> SavedChoice | None:
    """The saved choice that "auto" stands for, with the transport that was asked for or none."""
    from dualdist.rendezvous import saved_choice as choices

    def device() -> tuple[str, int]:
        import torch

        return device_name(select_device(None)), torch.get_num_threads()

    if not choices.is_applicable(topology):
        return None
    try:
        found = choices.find_choice(choices.load(choices.choices_path(environ)), topology, device)
    except UsageError as error:  # a file that the program's user may not know of ends no training
        tell(str(error))
        return None
    if found is None or transport not in ("", found.transport):
        return None
    lack = _lack(found)
    if lack is not None:
        tell(f"{describe_choice(found, environ)}; not taken: {lack}")
        return None
    return found


def _lack(saved: SavedChoice) -> str | None:
    """Why the choice does not count: other threads, or this Python lacks what the user's other one had; else None."""
    import torch

    own, theirs = torch.get_num_threads(), saved.conditions.threads
    if own != theirs:
        return f"ranks had {_threads(theirs)} there, and have {_threads(own)} here: OMP_NUM_THREADS={theirs} takes it"
    if saved.backend == "mpi":
        return None if find_spec("mpi4py") is not None else "mpi4py is not installed"
    if saved.backend == "horovod":
        from dualdist.backends.horovod import backend

        try:
            backend.import_horovod()
        except BackendUnavailableError as error:
            return str(error)
        if saved.transport == "mpi" and not backend.is_built_with_mpi():
            return "this Horovod was built without MPI"
    return None


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def describe_choice(saved: SavedChoice, environ: Mapping[str, str]) -> str:
    from dualdist.rendezvous import saved_choice as choices

    return f"{saved} ({choices.choices_path(environ)}; {BACKEND} goes before it)"

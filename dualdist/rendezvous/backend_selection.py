"""Choice of backend, transport and GPU: as requested, else as `dualdist compare --save-choice` saved, else by launcher.

Saved choices are kept in a file of the user; "auto" takes one in a job like the one that was compared. Importing this
imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dualdist.backends import registry
from dualdist.backends.registry import AUTO, HOROVOD, MPI, NATIVE, SINGLE
from dualdist.errors import TopologyError, UsageError
from dualdist.topology import Topology
from dualdist.utils.output_file import write_atomically
from dualdist.utils.suggest import require_choice

if TYPE_CHECKING:
    import torch

BACKEND = "DUALDIST_BACKEND"
TRANSPORT = "DUALDIST_TRANSPORT"
MPI_LAUNCHERS = ("mpirun", "mpiexec", "jsrun")
HOME, CONFIG = "HOME", "XDG_CONFIG_HOME"
SCHEMA = 2  # 1 had no threads

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


def select_device(topology: Topology | None) -> torch.device:
    """Return this rank's GPU, after making it the current one, or the CPU; without a topology, only the device type.

    A launcher that shows each rank only one GPU makes that GPU number 0 on every rank.
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


def select_backend(requested: str, topology: Topology) -> str:
    """Return the name of the backend to open, from what was requested and how the ranks were started."""
    return default_backend(topology.launcher, _find_mpi_libraries)[0] if requested == AUTO else requested


def _find_mpi_libraries() -> tuple[bool, bool, bool]:
    from dualdist.backends.horovod import backend

    return backend.is_built_with_mpi(), find_spec("mpi4py") is not None, select_device(None).type == "cuda"


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


@dataclass(frozen=True)
class ChoiceConditions:
    """The jobs that a saved choice is for, on one host. `device` is "cpu" or the GPU's name, `cores` are the host's."""

    processor: str
    cores: int
    device: str
    launcher: str
    mpi: bool  # the launcher started MPI
    ranks: int
    threads: int  # torch's, per rank

    @classmethod
    def here(cls, device: str, launcher: str, ranks: int, *, threads: int, mpi: bool) -> ChoiceConditions:
        from dualdist.utils.machine import machine, machine_cores

        return cls(machine().processor, machine_cores(), device, launcher, mpi, ranks, threads)

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks of {_format_threads(self.threads)}"
        return f"{self.launcher} with {ranks} on {self.cores} cores of {self.processor}, {self.device}"


@dataclass(frozen=True)
class SavedChoice:
    """A saved choice of backend and transport, with its date and reason."""

    conditions: ChoiceConditions
    backend: str
    transport: str
    at: str
    why: str

    def __str__(self) -> str:
        return f"{self.backend} over {self.transport}, as dualdist compare found on {self.at}: {self.why}"


def choices_path(environ: Mapping[str, str]) -> Path:
    folder = environ.get(CONFIG) or Path(environ.get(HOME) or os.path.expanduser("~"), ".config")
    return Path(folder, "dualdist", "choices.json")


def load_choices(path: Path) -> list[SavedChoice]:
    """Read a file of choices, [] if there is none; raise UsageError if it is damaged or of another version."""
    try:
        if not path.is_file():  # opening a pipe would block
            return []
        content = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}, expected {SCHEMA}")
        choices = [
            SavedChoice(**{**fields, "conditions": ChoiceConditions(**fields["conditions"])})
            for fields in content["choices"]
        ]
        hash(tuple(choice.conditions for choice in choices))
        return choices
    except (FileNotFoundError, PermissionError):
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path}: these saved choices cannot be read ({error!r}): delete the file") from error


def save_choices(path: Path, choices: Sequence[SavedChoice]) -> None:
    """Add choices to a file, replacing those for the same conditions; raise UsageError if it cannot be written."""
    replaced = {choice.conditions for choice in choices}
    content = [*(choice for choice in load_choices(path) if choice.conditions not in replaced), *choices]
    text = json.dumps({"schema": SCHEMA, "choices": [asdict(each) for each in content]}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{text}\n")
    except OSError as error:
        raise UsageError(f"{path}: the choice cannot be saved ({error.strerror}); set {CONFIG} to a folder") from error


def is_applicable(topology: Topology) -> bool:
    """Return True if saved choices apply to such a job: several ranks that are known to share one host."""
    is_on_one_host = topology.local_size == topology.size and "local_size" not in topology.inferred
    return topology.launcher != "none" and is_on_one_host


def find_choice(saved: Sequence[SavedChoice], topology: Topology, device: str, threads: int) -> SavedChoice | None:
    """Return the choice saved for such a job on such a host, else one for another number of threads, else None."""
    here = ChoiceConditions.here(device, topology.launcher, topology.size, threads=threads, mpi=topology.mpi)
    similar = [choice for choice in saved if replace(choice.conditions, threads=threads) == here]
    return next((choice for choice in similar if choice.conditions == here), next(iter(similar), None))


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

    from dualdist.utils.machine import device_name

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
            f"ranks had {_format_threads(compared)} there, and have {_format_threads(threads)} here: "
            f"OMP_NUM_THREADS={compared} takes it"
        )
    return spec.problem(saved.transport)


def _format_threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def describe_choice(saved: SavedChoice, environ: Mapping[str, str]) -> str:
    return f"{saved} ({choices_path(environ)}; {BACKEND} goes before it)"

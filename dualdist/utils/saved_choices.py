"""The user's file of choices of a backend, which `dualdist compare --save-choice` writes and "auto" reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dualdist.errors import UsageError
from dualdist.topology import Topology
from dualdist.utils.output_file import write_atomically

HOME, CONFIG = "HOME", "XDG_CONFIG_HOME"
SCHEMA = 3  # 2 had no local_ranks


@dataclass(frozen=True)
class ChoiceConditions:
    """The jobs that a saved choice is for, by their hosts, all alike: `local_ranks` of the `ranks` are on each.

    `device` is "cpu" or the GPU's name, `cores` are a host's.
    """

    processor: str
    cores: int
    device: str
    launcher: str
    mpi: bool  # the launcher started MPI
    ranks: int
    threads: int  # torch's, per rank
    local_ranks: int

    @classmethod
    def here(
        cls, device: str, launcher: str, ranks: int, *, threads: int, mpi: bool, local_ranks: int | None = None
    ) -> ChoiceConditions:
        from dualdist.utils.machine import machine, machine_cores  # `import dualdist` needs neither

        processor, cores = machine().processor, machine_cores()
        return cls(processor, cores, device, launcher, mpi, ranks, threads, local_ranks or ranks)

    @property
    def hosts(self) -> int:
        return self.ranks // self.local_ranks

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts, each with " if self.hosts > 1 else ""
        ranks = f"{self.ranks} ranks of {format_threads(self.threads)}"
        return f"{self.launcher} with {ranks} on {hosts}{self.cores} cores of {self.processor}, {self.device}"


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
    """Return True if saved choices apply to such a job: several ranks, known to be equally many on each host."""
    is_even = topology.local_size * topology.num_nodes == topology.size and "local_size" not in topology.inferred
    return topology.launcher != "none" and is_even


def find_choice(saved: Sequence[SavedChoice], topology: Topology, device: str, threads: int) -> SavedChoice | None:
    """Return the choice saved for such a job on such a host, else one for another number of threads, else None."""
    here = ChoiceConditions.here(
        device,
        topology.launcher,
        topology.size,
        threads=threads,
        mpi=topology.mpi,
        local_ranks=topology.local_size,
    )
    similar = [choice for choice in saved if replace(choice.conditions, threads=threads) == here]
    return next((choice for choice in similar if choice.conditions == here), next(iter(similar), None))


def format_threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"

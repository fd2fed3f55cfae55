"""The backends that `dualdist compare --save-choice` found the fastest, and where: a file of the user's.

init("auto") takes one where everything is as it was then. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dualdist.errors import UsageError
from dualdist.rendezvous.backend_selection import BACKENDS, TRANSPORTS
from dualdist.topology import Topology
from dualdist.utils.machine import machine, machine_cores

HOME, CONFIG = "HOME", "XDG_CONFIG_HOME"
SCHEMA = 2  # 1 knew of no threads


@dataclass(frozen=True)
class ChoiceConditions:
    """Where a choice counts: on one host of this kind. `device` is "cpu" or the GPU's name, `cores` are all of them."""

    processor: str
    cores: int
    device: str
    launcher: str
    mpi: bool  # whether the launcher started MPI
    ranks: int
    threads: int  # torch's, of a rank

    @classmethod
    def here(cls, device: str, launcher: str, ranks: int, *, threads: int, mpi: bool) -> ChoiceConditions:
        return cls(machine().processor, machine_cores(), device, launcher, mpi, ranks, threads)

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks of {self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{self.launcher} with {ranks} on {self.cores} cores of {self.processor}, {self.device}"


@dataclass(frozen=True)
class SavedChoice:
    """A choice: backend and transport, when and why they were chosen."""

    conditions: ChoiceConditions
    backend: str
    transport: str
    at: str
    why: str

    def __str__(self) -> str:
        return f"{self.backend} over {self.transport}, as dualdist compare found on {self.at}: {self.why}"


def choices_path(environ: Mapping[str, str]) -> Path:
    """The file in which this user's choices are kept."""
    folder = environ.get(CONFIG) or Path(environ.get(HOME) or os.path.expanduser("~"), ".config")
    return Path(folder, "dualdist", "choices.json")


def load(path: Path) -> list[SavedChoice]:
    """The choices of a file, none where there is no file; UsageError where it is damaged or of another dualdist."""
    try:
        if not path.is_file():  # opening a pipe would wait for somebody who writes
            return []
        kept = json.loads(path.read_text())
        if kept["schema"] != SCHEMA:
            raise ValueError(f"schema {kept['schema']!r}, expected {SCHEMA}")
        return [_saved(each) for each in kept["choices"]]
    except (FileNotFoundError, PermissionError):
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path}: these saved choices cannot be read ({error!r}): delete the file") from error


def _saved(kept: Mapping[str, Any]) -> SavedChoice:
    """ValueError, TypeError or KeyError where this is none."""
    found = SavedChoice(**{**kept, "conditions": ChoiceConditions(**kept["conditions"])})
    if found.backend not in BACKENDS or found.transport not in TRANSPORTS:
        raise ValueError(f"{found.backend!r} over {found.transport!r} is no choice")
    hash(found.conditions)
    return found


def save(path: Path, fresh: Sequence[SavedChoice]) -> None:
    """The file has these choices, in place of older ones under the same conditions; UsageError where it cannot."""
    replaced = {each.conditions for each in fresh}
    kept = [*(each for each in load(path) if each.conditions not in replaced), *fresh]
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"schema": SCHEMA, "choices": [asdict(each) for each in kept]}, indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: the choice cannot be saved ({error.strerror}); set {CONFIG} to a folder") from error


def is_applicable(topology: Topology) -> bool:
    """No choice counts for a rank alone, nor for ranks that may be on several hosts, as one host was compared."""
    is_on_one_host = topology.local_size == topology.size and "local_size" not in topology.inferred
    return topology.launcher != "none" and is_on_one_host


def find_choice(
    saved: Sequence[SavedChoice], topology: Topology, device: Callable[[], tuple[str, int]]
) -> SavedChoice | None:
    """The choice that was made for such a job on such a host, else one for other threads, if there is one.

    `device` gives "cpu" or a GPU's name, and a rank's threads, which take a while to find out.
    """
    if not saved or not is_applicable(topology):
        return None
    name, threads = device()
    here = ChoiceConditions.here(name, topology.launcher, topology.size, threads=threads, mpi=topology.mpi)
    near = [each for each in saved if replace(each.conditions, threads=threads) == here]
    return next((each for each in near if each.conditions == here), next(iter(near), None))

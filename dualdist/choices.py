"""The backends that `dualdist compare --save-choice` found the fastest, and where: a file of the user's.

init("auto") takes one where everything is as it was then. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dualdist.compare.machine import machine
from dualdist.errors import UsageError
from dualdist.topology import Topology

HOME, CONFIG = "HOME", "XDG_CONFIG_HOME"
SCHEMA = 1


@dataclass(frozen=True)
class Conditions:
    """Where a choice counts: on one host of this kind. `device` is "cpu" or the GPU's name, `cores` are all of them."""

    processor: str
    cores: int
    device: str
    launcher: str
    mpi: bool  # whether the launcher started MPI
    ranks: int

    @classmethod
    def here(cls, device: str, launcher: str, ranks: int, *, mpi: bool) -> Conditions:
        return cls(machine().processor, os.cpu_count() or 1, device, launcher, mpi, ranks)

    def __str__(self) -> str:
        return f"{self.launcher} with {self.ranks} ranks on {self.cores} cores of {self.processor}, {self.device}"


@dataclass(frozen=True)
class Saved:
    """A choice: backend and transport, when and why they were chosen."""

    conditions: Conditions
    backend: str
    transport: str
    at: str
    why: str

    def __str__(self) -> str:
        return f"{self.backend} over {self.transport}, as dualdist compare found on {self.at}: {self.why}"


def path_of(environ: Mapping[str, str]) -> Path:
    """The file in which this user's choices are kept."""
    folder = environ.get(CONFIG) or Path(environ.get(HOME) or os.path.expanduser("~"), ".config")
    return Path(folder, "dualdist", "choices.json")


def load(path: Path) -> list[Saved]:
    """The choices of a file, none where there is no file; UsageError where it is damaged."""
    try:
        kept = json.loads(path.read_text())
        return [Saved(**{**each, "conditions": Conditions(**each["conditions"])}) for each in kept["choices"]]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: these saved choices cannot be read ({error!r}): delete the file") from error


def save(path: Path, fresh: Sequence[Saved]) -> None:
    """The file has these choices, in place of older ones under the same conditions."""
    replaced = {each.conditions for each in fresh}
    kept = [*(each for each in load(path) if each.conditions not in replaced), *fresh]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"schema": SCHEMA, "choices": [asdict(each) for each in kept]}, indent=1) + "\n")
    draft.replace(path)


def of_job(saved: Sequence[Saved], topology: Topology, device: Callable[[], str]) -> Saved | None:
    """The choice that was made for such a job on such a host, if there is one.

    There is none for a rank alone, nor for ranks that may be on several hosts, as one host was compared.
    `device` gives "cpu" or a GPU's name, which takes a while to find out.
    """
    is_on_one_host = topology.local_size == topology.size and "local_size" not in topology.inferred
    if not saved or topology.launcher == "none" or not is_on_one_host:
        return None
    here = Conditions.here(device(), topology.launcher, topology.size, mpi=topology.mpi)
    return next((each for each in saved if each.conditions == here), None)

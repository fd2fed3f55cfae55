"""The command lines of the two MPI families on a small machine, as root or not."""

from __future__ import annotations

import shutil
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenMPI:
    """Open MPI's mpirun."""

    mpirun: str

    def run(self, ranks: int, *options: str) -> list[str]:
        """The argv that the program's own argv follows. More ranks than cores are welcome, and none is bound to one."""
        return [self.mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *options]


@dataclass(frozen=True)
class MPICH:
    """MPICH's mpiexec, the Hydra process manager: it takes root and more ranks than cores as they are."""

    mpiexec: str

    def run(self, ranks: int, *options: str) -> list[str]:
        """The argv that the program's own argv follows."""
        return [self.mpiexec, "-n", str(ranks), *options]


def find(names: tuple[str, ...], path: str) -> str | None:
    """The first of names that path has."""
    return next((found for name in names if (found := shutil.which(name, path=path))), None)

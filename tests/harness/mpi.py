"""Command lines of Open MPI and MPICH on a small machine, as root or not."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEBIANS_MPICH = "/usr/lib/*/libmpich.so.12"
# Not on PATH, where mpirun is Open MPI's.
PYPIS_MPICH = Path(sys.prefix, "mpich")


@dataclass(frozen=True)
class OpenMPI:
    """Open MPI's mpirun."""

    mpirun: str

    def run(self, ranks: int, *options: str) -> list[str]:
        """Return the argv to which the program is appended: allows more ranks than cores, without binding."""
        return [self.mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *options]


@dataclass(frozen=True)
class MPICH:
    """MPICH's mpiexec (Hydra), which allows root and more ranks than cores."""

    mpiexec: str

    def run(self, ranks: int, *options: str) -> list[str]:
        """Return the argv to which the program is appended."""
        return [self.mpiexec, "-n", str(ranks), *options]


def find(names: tuple[str, ...], path: str) -> str | None:
    """Return the first of `names` on `path`."""
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def of_mpich(folder: Path) -> Mapping[str, str]:
    """Return variables with which PyPI's mpi4py, built for any MPI, uses Debian's MPICH; `folder` must be kept.

    mpi4py looks for the library by MPICH's name, which Debian changes.
    """
    link = folder / "libmpi.so.12"
    if not link.exists():
        link.symlink_to(next(Path("/").glob(DEBIANS_MPICH.removeprefix("/"))))
    return {"LD_LIBRARY_PATH": str(folder), "MPI4PY_LIBMPI": str(link)}


def of_pypis_mpich() -> Mapping[str, str]:
    """Return the same for PyPI's MPICH, which is installed in a separate folder."""
    return {"MPI4PY_LIBMPI": str(PYPIS_MPICH / "lib" / "libmpi.so.12")}

"""Every way in which two ranks are started on this host."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from faults import training
from harness.jobs import Launch
from harness.mpi import MPICH, PYPIS_MPICH, OpenMPI, of_pypis_mpich

SPAWNER = str(Path(__file__).with_name("spawner.py"))
RUN = (sys.executable, "-m", "dualdist", "run", "-np", "2", "--launcher")
PYTHON = (sys.executable,)
# What the program follows, and whether the launcher starts the interpreter.
STARTS: Mapping[str, Sequence[str]] = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node=2"),
    "horovodrun": ("horovodrun", "--gloo", "-np", "2", *PYTHON),
    "horovodrun-mpi": ("horovodrun", "--mpi", "-np", "2", *PYTHON),
    "mpirun": (*OpenMPI("mpirun").run(2), *PYTHON),
    "mpich": (*MPICH(str(PYPIS_MPICH / "bin" / "mpiexec")).run(2), *PYTHON),
    "spawn": (*PYTHON, SPAWNER),
    "run-torchrun": (*RUN, "torchrun"),
    "run-horovodrun": (*RUN, "horovodrun"),
    "run-horovodrun-mpi": (*RUN, "horovodrun-mpi"),
    "run-mpirun": (*RUN, "mpirun"),
    "run-spawn": (*RUN, "spawn"),
}


@dataclass(frozen=True)
class Cell:
    """A launcher, a backend, and what carries its tensors."""

    start: str
    backend: str
    transport: str

    def __str__(self) -> str:
        return f"{self.start}-{self.backend}-{self.transport}"

    def argv(self, program: str, *words: str) -> list[str]:
        return [*STARTS[self.start], program, self.backend, *words]

    @property
    def env(self) -> Mapping[str, str]:
        chosen = {"DUALDIST_TRANSPORT": self.transport}
        return {**chosen, **of_pypis_mpich()} if self.start == "mpich" else chosen


CELLS = [
    *(Cell(start, "native", "shm") for start in STARTS),
    *(Cell(start, "native", "gloo") for start in ("torchrun", "mpirun", "run-spawn")),
    *(Cell(start, "horovod", "gloo") for start in ("torchrun", "horovodrun", "mpirun", "spawn", "run-horovodrun")),
    *(Cell(start, "horovod", "mpi") for start in ("horovodrun-mpi", "mpirun", "run-horovodrun-mpi", "run-mpirun")),
    *(Cell(start, "mpi", "mpi") for start in ("horovodrun-mpi", "mpirun", "mpich", "run-mpirun")),
]


def trained(launch: Launch, cell: Cell) -> list[str]:
    """What each rank has in the end."""
    argv = cell.argv(training.__file__, str(launch.directory))
    return [seen["parameters"] for seen in launch.reports(argv, 2, env=cell.env)]

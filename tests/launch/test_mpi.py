"""The backend mpi where MPI is not as usual."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness.jobs import Launch
from harness.mpi import OpenMPI

PROGRAM = str(Path(__file__).with_name("mpi_program.py"))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["pieces", "one-thread"])
def test_every_operation_is_exact(openmpi: OpenMPI, launch: Launch, case: str, ranks: int) -> None:
    """Tensors that MPI cannot count in one call; an MPI that the program has started, for one thread at a time."""
    launch.reports([*openmpi.run(ranks), sys.executable, PROGRAM, case], ranks)

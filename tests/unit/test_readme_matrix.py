"""The README's table of launchers, backends and transports calls that tested which is a cell of the contract's laws."""

from __future__ import annotations

import re

import pytest
from contract.test_laws import CELLS
from harness.base_env import ROOT

# How the cells name what the rows and the columns are called for people; a file of tests/launch has Slurm's.
STARTED_BY = {
    "plain python, one rank": "python",
    "`dd.spawn`": "spawn",
    "torchrun": "torchrun",
    "horovodrun --gloo": "horovodrun-gloo",
    "horovodrun --mpi (Open MPI 4.1)": "horovodrun-mpi",
    "mpirun (Open MPI 4.1)": "mpirun",
    "mpiexec (MPICH)": "mpiexec-mpich",
}
# By tests/launch/test_mpi.py.
TRAINED_ELSEWHERE = {"mpiexec (MPICH)": {"native"}}
CARRIED_BY = {"native": "native", "Horovod over Gloo": "horovod gloo", "Horovod over MPI": "horovod mpi", "mpi": "mpi"}


def table() -> dict[str, dict[str, str]]:
    """By row and column."""
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index(f"| | {' | '.join(CARRIED_BY)} |")
    rows = [re.findall(r" ([^|]*?) (?=\|)", line) for line in lines[first + 2 : lines.index("", first)]]
    return {row[0]: dict(zip(CARRIED_BY, row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("row", STARTED_BY)
def test_what_the_readme_calls_tested_is_what_the_laws_run_on(row: str) -> None:
    ran = {f"{cell.backend} {cell.transport}" for cell in CELLS if cell.started_by == STARTED_BY[row]}
    kept = {column for column, carrier in CARRIED_BY.items() if any(one.startswith(carrier) for one in ran)}
    tested = {column for column, said in table()[row].items() if said == "tested"}
    assert tested == kept | TRAINED_ELSEWHERE.get(row, set())


def test_no_row_is_left_out() -> None:
    assert [row for row in table() if not row.startswith("srun")] == list(STARTED_BY)

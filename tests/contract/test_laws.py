"""Every law on every backend under every launcher, each cell one real job; Slurm has a file in tests/launch."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import program
from contract.laws import ALONE, LAWS, batch, net
from harness.installed import lack
from harness.jobs import Launch
from harness.mpi import MPICH, OpenMPI, of_mpich

PROGRAM = str(Path(program.__file__))
SPAWNER = str(Path(program.__file__).with_name("spawner.py"))
TRANSPORT = "DUALDIST_TRANSPORT"


@dataclass(frozen=True)
class Cell:
    """A way to start ranks, the backend they ask for, and what they must find."""

    started_by: str
    asked: str
    launcher: str
    backend: str
    transport: str
    ranks: int = 2
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.started_by}-{self.asked or 'default'}-{self.transport}-{self.ranks}"

    def argv(self) -> list[str]:
        python = [sys.executable, PROGRAM, *filter(None, [self.asked])]
        ranks = str(self.ranks)
        match self.started_by:
            case "torchrun":
                return ["torchrun", f"--nproc-per-node={ranks}", "--standalone", *python[1:]]
            case "horovodrun-gloo":
                return ["horovodrun", "--gloo", "-np", ranks, *python]
            case "horovodrun-mpi":
                return ["horovodrun", "--mpi", "-np", ranks, *python]
            case "mpirun":
                return [*OpenMPI("mpirun").run(self.ranks), *python]
            case "mpiexec-mpich":
                return [*MPICH("mpiexec.mpich").run(self.ranks), *python]
            case "spawn":
                return [sys.executable, SPAWNER, ranks, *filter(None, [self.asked])]
        return python


GLOO = ((TRANSPORT, "gloo"),)
MPI = ((TRANSPORT, "mpi"),)
CELLS = [
    Cell("python", "", "none", "single", "none", ranks=1),
    Cell("python", "native", "none", "native", "gloo", ranks=1),
    Cell("python", "horovod", "none", "horovod", "gloo", ranks=1),
    Cell("python", "horovod", "none", "horovod", "mpi", ranks=1, variables=MPI),
    Cell("spawn", "", "spawn", "native", "shm"),
    Cell("spawn", "horovod", "spawn", "horovod", "gloo"),
    Cell("torchrun", "", "torchrun", "native", "shm"),
    Cell("torchrun", "native", "torchrun", "native", "shm", ranks=4),
    Cell("torchrun", "native", "torchrun", "native", "gloo", variables=GLOO),
    Cell("torchrun", "native", "torchrun", "native", "gloo", ranks=4, variables=GLOO),
    Cell("torchrun", "horovod", "torchrun", "horovod", "gloo"),
    Cell("torchrun", "horovod", "torchrun", "horovod", "gloo", ranks=4),
    Cell("horovodrun-gloo", "", "horovodrun", "horovod", "gloo"),
    Cell("horovodrun-gloo", "native", "horovodrun", "native", "shm"),
    Cell("horovodrun-mpi", "", "horovodrun", "horovod", "mpi"),
    Cell("horovodrun-mpi", "horovod", "horovodrun", "horovod", "gloo", variables=GLOO),
    Cell("horovodrun-mpi", "native", "horovodrun", "native", "shm"),
    Cell("mpirun", "", "mpirun", "horovod", "mpi"),
    Cell("mpirun", "horovod", "mpirun", "horovod", "mpi", ranks=4),
    Cell("mpirun", "horovod", "mpirun", "horovod", "gloo", variables=GLOO),
    Cell("mpirun", "native", "mpirun", "native", "shm"),
    Cell("python", "mpi", "none", "mpi", "mpi", ranks=1),
    Cell("mpirun", "mpi", "mpirun", "mpi", "mpi"),
    Cell("mpirun", "mpi", "mpirun", "mpi", "mpi", ranks=4),
    Cell("horovodrun-mpi", "mpi", "horovodrun", "mpi", "mpi"),
    Cell("mpiexec-mpich", "mpi", "mpirun", "mpi", "mpi"),
]


class Jobs:
    """Runs each cell's job once, when the first test asks for it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._reports: dict[Cell, list[dict[str, Any]] | BaseException] = {}

    def reports(self, cell: Cell) -> list[dict[str, Any]]:
        if cell not in self._reports:
            try:
                env = dict(cell.variables)
                if cell.started_by == "mpiexec-mpich":
                    if shutil.which("mpiexec.mpich", path=self._launch.env["PATH"]) is None:
                        lack("mpiexec.mpich", "mpich")
                    env |= of_mpich(self._launch.directory)
                self._reports[cell] = self._launch.reports(cell.argv(), cell.ranks, env=env, timeout_s=300)
            except AssertionError as error:
                self._reports[cell] = error
        found = self._reports[cell]
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.fixture(scope="session")
def jobs(base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(Launch(base_env, tmp_path_factory.mktemp("contract")))


@pytest.mark.parametrize("name", [*LAWS, *ALONE])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_law_holds(jobs: Jobs, cell: Cell, name: str) -> None:
    for report in jobs.reports(cell):
        assert name not in report["failures"], report["failures"][name]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_rank_knows_its_place_and_its_backend(jobs: Jobs, cell: Cell) -> None:
    for rank, report in enumerate(jobs.reports(cell)):
        expected = {
            "rank": rank,
            "size": cell.ranks,
            "local_rank": rank,
            "local_size": cell.ranks,
            "node": 0,
            "nodes": 1,
            "launcher": cell.launcher,
            "backend": cell.backend,
            "transport": cell.transport,
            "again": sum(range(cell.ranks)),
            "stepped_to": 1 - sum(range(cell.ranks)) / cell.ranks,
        }
        assert {name: report[name] for name in expected} == expected


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.ranks == 2], ids=str)
def test_two_ranks_train_to_the_same_bits_everywhere(jobs: Jobs, cell: Cell) -> None:
    reference = jobs.reports(Cell("torchrun", "", "torchrun", "native", "shm"))[0]["hash"]
    assert [report["hash"] for report in jobs.reports(cell)] == [reference, reference]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_training_is_that_of_one_process_on_the_whole_batch(jobs: Jobs, cell: Cell) -> None:
    """float32 sums in another order over 60 steps: 1e-4 is far above the rounding and far below an error."""
    expected = trained_alone()
    for report in jobs.reports(cell):
        for name, values in report["parameters"].items():
            torch.testing.assert_close(torch.tensor(values), expected[name], rtol=1e-4, atol=1e-4)


def test_training_is_that_of_distributed_data_parallel(jobs: Jobs) -> None:
    """Two ranks of DDP add and divide in another order than dualdist, so the last bits may differ."""
    for report in jobs.reports(Cell("torchrun", "", "torchrun", "native", "shm")):
        for name, values in report["ddp"].items():
            mine = torch.tensor(report["parameters"][name])
            torch.testing.assert_close(mine, torch.tensor(values), rtol=1e-4, atol=1e-4)


def trained_alone() -> dict[str, torch.Tensor]:
    """The program's training, by plain torch in this process, on the whole batch at once."""
    model = copy.deepcopy(net(seed=program.SEED))
    optimizer = torch.optim.SGD(model.parameters(), **program.SGD)
    for step in range(program.STEPS):
        pieces = [batch(number, step) for number in range(program.BATCHES)]
        x, y = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), program.CLIP)
        optimizer.step()
    return model.state_dict()

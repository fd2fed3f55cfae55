"""Run every law on every backend, transport and number of ranks, and the same training under every launcher.

A law's outcome depends on what moves the tensors and on the number of ranks, not on who started them: all laws run in
LAW_CELLS, and the other launchers' cells run the laws of rendezvous and the training. Slurm has a file in tests/launch.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import negotiation_laws, rank
from contract.accelerators import laws_on_accelerators
from contract.laws import ALONE, LAWS
from contract.oracle import digest, loss_of, net
from harness import leaks
from harness.accelerator.build import build
from harness.effort import Effort
from harness.installed import lack
from harness.jobs import Launch
from harness.mpi import MPICH, OpenMPI, of_mpich
from harness.rank_pool import RankPool

PROGRAM = str(Path(rank.__file__))
SPAWNER = str(Path(rank.__file__).with_name("spawner.py"))
PLUGIN = Path(rank.__file__).with_name("plugin")  # a backend of another package, found by its entry point
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
        kind = "-pure" * (self.variables == PURE) + "-accelerator" * self.has_accelerator
        return f"{self.started_by}-{self.asked or 'default'}-{self.transport}-{self.ranks}{kind}"

    @property
    def has_accelerator(self) -> bool:
        return rank.ACCELERATOR in dict(self.variables)

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
PURE = (("DUALDIST_NO_EXTENSION", "1"),)
REFERENCE = Cell("spawn", "", "spawn", "native", "shm")
# Each backend and transport once, with all laws.
LAW_CELLS = [
    Cell("python", "", "none", "single", "none", ranks=1),
    REFERENCE,
    Cell("torchrun", "native", "torchrun", "native", "shm", ranks=4),
    Cell("spawn", "native", "spawn", "native", "gloo", variables=PURE),
    Cell("torchrun", "native", "torchrun", "native", "gloo", variables=GLOO),
    Cell("horovodrun-gloo", "", "horovodrun", "horovod", "gloo"),
    Cell("mpirun", "mpi", "mpirun", "mpi", "mpi"),
]
# More ranks, other transports and another MPI, in the full tier only: the laws that depend on what moves the tensors.
TRANSPORT_CELLS = [
    Cell("torchrun", "sockets", "torchrun", "sockets", "tcp"),
    Cell("python", "native", "none", "native", "gloo", ranks=1),
    Cell("python", "mpi", "none", "mpi", "mpi", ranks=1),
    Cell("mpirun", "", "mpirun", "horovod", "mpi", variables=PURE),
    Cell("torchrun", "native", "torchrun", "native", "gloo", ranks=4, variables=GLOO),
    Cell("mpirun", "mpi", "mpirun", "mpi", "mpi", ranks=4),
    Cell("mpiexec-mpich", "mpi", "mpirun", "mpi", "mpi"),
]
# The same backends under the other launchers, in the full tier only; and Horovod, the slowest, on one and four ranks.
LAUNCHER_CELLS = [
    Cell("python", "horovod", "none", "horovod", "gloo", ranks=1),
    Cell("python", "horovod", "none", "horovod", "mpi", ranks=1, variables=MPI),
    Cell("mpirun", "horovod", "mpirun", "horovod", "mpi", ranks=4),
    Cell("torchrun", "horovod", "torchrun", "horovod", "gloo", ranks=4),
    Cell("horovodrun-mpi", "mpi", "horovodrun", "mpi", "mpi"),
    Cell("torchrun", "", "torchrun", "native", "shm"),
    Cell("spawn", "horovod", "spawn", "horovod", "gloo"),
    Cell("horovodrun-gloo", "native", "horovodrun", "native", "shm"),
    Cell("horovodrun-mpi", "", "horovodrun", "horovod", "mpi"),
    Cell("horovodrun-mpi", "horovod", "horovodrun", "horovod", "gloo", variables=GLOO),
    Cell("horovodrun-mpi", "native", "horovodrun", "native", "shm"),
    Cell("mpirun", "horovod", "mpirun", "horovod", "gloo", variables=GLOO),
    Cell("mpirun", "native", "mpirun", "native", "shm"),
]
# All tensors on the simulated accelerator, in the full tier: through host memory by all backends, and by a library.
ACCELERATOR_CELLS = [
    Cell("spawn", "", "spawn", "native", "shm", variables=((rank.ACCELERATOR, ""),)),
    Cell("spawn", "", "spawn", "native", "simccl", variables=((rank.ACCELERATOR, "simccl"),)),
    Cell("mpirun", "mpi", "mpirun", "mpi", "mpi", variables=((rank.ACCELERATOR, ""),)),
    Cell("horovodrun-gloo", "", "horovodrun", "horovod", "gloo", variables=((rank.ACCELERATOR, ""),)),
]
CELLS = [*LAW_CELLS, *TRANSPORT_CELLS, *LAUNCHER_CELLS, *ACCELERATOR_CELLS]
FULL = {*TRANSPORT_CELLS, *LAUNCHER_CELLS, *ACCELERATOR_CELLS}
# Each backend and transport once, where the full tier has ranks in any case, and what runs without the extension.
RANDOM_CELLS = [
    *(cell for cell in TRANSPORT_CELLS if cell.ranks > 1 and cell.started_by != "mpiexec-mpich"),
    *(cell for cell in LAUNCHER_CELLS if (cell.started_by, cell.asked) == ("torchrun", "")),
    *(cell for cell in LAW_CELLS if cell.variables == PURE),
]
RENDEZVOUS_LAWS = [name for name in (*LAWS, *ALONE) if name in vars(negotiation_laws)]
# Other modules' laws are about what each rank does by itself, or built of what these move.
MOVING = "negotiation collective reduction gather_scatter value backward step sharding memory"
TRANSPORT_LAWS = [
    name
    for name, law in {**LAWS, **ALONE}.items()
    if law.__module__.removesuffix("_laws").rpartition(".")[2] in MOVING.split()
]


def in_cells(cells: Iterable[Cell], laws: Sequence[str] = ()) -> list[Any]:
    """Return parameters for each cell, or for each law in each cell. A cell's tests share a worker of pytest-xdist."""
    params = []
    for cell in cells:
        marks = [pytest.mark.xdist_group(str(cell)), *([pytest.mark.full] if cell in FULL else [])]
        params += [pytest.param(cell, law, marks=marks, id=f"{cell}-{law}") for law in laws] or [
            pytest.param(cell, marks=marks, id=str(cell))
        ]
    return params


@dataclass(frozen=True)
class Ranks:
    """The running ranks of a cell."""

    cell: Cell
    run: Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """The ranks of one cell, which are started with its first test and end before those of another cell start."""
    cell: Cell = request.param
    launch = Launch(base_env, tmp_path_factory.mktemp("contract"))
    env = dict(cell.variables)
    if cell.backend == "sockets":
        env["PYTHONPATH"] = f"{base_env['PYTHONPATH']}:{PLUGIN}"
    if cell.started_by == "mpiexec-mpich":
        if shutil.which("mpiexec.mpich", path=base_env["PATH"]) is None:
            lack("mpiexec.mpich", "mpich")
        env |= of_mpich(launch.directory)
    if cell.has_accelerator:
        build()
    pool = RankPool(lambda more: launch.start(cell.argv(), env={**env, **more}), cell.ranks, leaks.LONG_LIVED.add)
    yield Ranks(cell, pool.run)
    pool.close()


@pytest.mark.parametrize("ranks", in_cells(CELLS), indirect=True)
def test_every_rank_knows_its_topology_and_its_backend(ranks: Ranks) -> None:
    cell = ranks.cell
    for number, found in enumerate(ranks.run("topology")):
        here = (number, cell.ranks, number, cell.ranks, 0, 1, cell.launcher, cell.backend, cell.transport)
        assert found == dict(zip(rank.TOPOLOGY, here, strict=True))


@pytest.mark.parametrize("ranks", in_cells(CELLS), indirect=True)
def test_training_matches_one_process_on_the_whole_batch(ranks: Ranks) -> None:
    """At two ranks to the bit, as a sum of two has one order.

    With more, 1e-4 is far above the rounding of 60 steps in float32 and far below an error.
    """
    expected = trained_alone(ranks.cell.ranks)
    for found in ranks.run("training"):
        for name, values in found["parameters"].items():
            torch.testing.assert_close(torch.tensor(values), expected.state_dict()[name], rtol=1e-4, atol=1e-4)
        assert found["hash"] == digest(expected) or ranks.cell.ranks > 2


@pytest.mark.parametrize("ranks", in_cells(CELLS), indirect=True)
def test_ordered_training_has_the_bits_of_one_process_that_adds_in_rank_order(ranks: Ranks) -> None:
    """Everywhere, with any number of ranks, with large and small buckets, and after resuming."""
    expected = digest(trained_alone(ranks.cell.ranks))
    for hashes in ranks.run("ordered training"):
        assert hashes == [expected] * len(hashes)


@pytest.mark.parametrize(
    ("ranks", "law"),
    [
        *in_cells(LAW_CELLS, [*LAWS, *ALONE]),
        *in_cells(TRANSPORT_CELLS, TRANSPORT_LAWS),
        *in_cells(LAUNCHER_CELLS, RENDEZVOUS_LAWS),
        *in_cells(ACCELERATOR_CELLS[:1], laws_on_accelerators(has_library=False)),
        *in_cells(ACCELERATOR_CELLS[1:2], laws_on_accelerators(has_library=True)),
    ],
    indirect=["ranks"],
)
def test_the_law_holds(ranks: Ranks, law: str) -> None:
    ranks.run(law)


@pytest.mark.full
@pytest.mark.parametrize("ranks", in_cells(RANDOM_CELLS), indirect=True)
def test_random_trainings_match_one_process(ranks: Ranks, effort: Effort) -> None:
    """Always the same few; with --long many more. Every seventh has nothing that one rank does alone."""
    for seed in range(effort(4, 1000)):
        ranks.run(f"{rank.RANDOM}{seed}")
        effort.count("random trainings")


@pytest.mark.full
@pytest.mark.parametrize("ranks", in_cells(RANDOM_CELLS), indirect=True)
def test_tensors_of_every_kind_are_sent_or_refused_on_every_rank(ranks: Ranks, effort: Effort) -> None:
    for seed in range(1, 1 + effort(1, 20)):
        ranks.run(f"{rank.SENT}{seed}")
        effort.count("drawn tensors", rank.FULL_DRAWS)


def trained_alone(size: int) -> torch.nn.Module:
    """Train by plain torch in this process: the gradients of all ranks, added in rank order, then divided."""
    model = net(seed=rank.SEED)
    optimizer = torch.optim.SGD(model.parameters(), **rank.SGD)
    for step in range(rank.STEPS):
        parts = []
        for number in range(size):
            mine = range(number, rank.BATCHES, size)
            model.zero_grad()
            sum(loss_of(model, part, step) / len(mine) for part in mine).backward()
            parts.append([param.grad for param in model.parameters()])
        for param, *grads in zip(model.parameters(), *parts, strict=True):
            param.grad = None if grads[0] is None else reduce(torch.add, grads) / size
        torch.nn.utils.clip_grad_norm_(model.parameters(), rank.CLIP)
        optimizer.step()
    return model

"""init_process_group("dualdist"): programs of torch.distributed as they are, on every transport."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import leaks
from harness.base_env import ROOT
from harness.jobs import Launch
from harness.mpi import OpenMPI
from harness.rank_pool import RankPool
from launch.running import EXEC, EXEC_STARTS, TORCHRUN

from dualdist.c10d.torch_backend import is_replaced

PROGRAM = str(Path(__file__).with_name("torch_backend_rank.py"))


@dataclass(frozen=True)
class Cell:
    """How the ranks start, and what carries their tensors."""

    launcher: str
    ranks: int
    variables: tuple[tuple[str, str], ...] = ()
    refused: str = ""  # words of the error of what the transport does not have

    def start(self) -> Sequence[str]:
        if self.launcher == "torchrun":
            return [*TORCHRUN[:-1], f"--nproc-per-node={self.ranks}"]
        return (
            EXEC_STARTS["horovodrun"] if self.launcher == "horovodrun" else [*OpenMPI("mpirun").run(self.ranks), *EXEC]
        )


BACKEND, TRANSPORT = "DUALDIST_BACKEND", "DUALDIST_TRANSPORT"
NO_PEERS = "the backend horovod has no send and recv"
CELLS = {
    "shm-2": Cell("torchrun", 2),
    "shm-2-pure": Cell("torchrun", 2, (("DUALDIST_NO_EXTENSION", "1"),)),
    "gloo-3": Cell("torchrun", 3, ((TRANSPORT, "gloo"),)),
    "mpi-2": Cell("mpirun", 2, ((BACKEND, "mpi"),)),
    "horovod-gloo-2": Cell("horovodrun", 2, ((BACKEND, "horovod"),), NO_PEERS),
    "horovod-mpi-2": Cell("mpirun", 2, ((BACKEND, "horovod"),), NO_PEERS),
}


@pytest.fixture
def pool(
    request: pytest.FixtureRequest, base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankPool]:
    cell = CELLS[request.param]
    launch = Launch(base_env, tmp_path_factory.mktemp("torch-backend"))
    argv = [*cell.start(), PROGRAM, *filter(None, [cell.refused])]
    env = dict(cell.variables)
    pool = RankPool(lambda more: launch.start(argv, env={**env, **more}), cell.ranks, leaks.LONG_LIVED.add)
    yield pool
    pool.close()


@pytest.mark.smoke("shm-2", "mpi-2")
@pytest.mark.parametrize("pool", CELLS, indirect=True)
def test_the_laws_of_torch_distributed_hold(pool: RankPool) -> None:
    """All in one test, as the start of the ranks is most of its cost."""
    laws = pool.run("laws")[0]
    assert len(laws) > 10
    for law in laws:
        pool.run(law)


STARTS_ITS_OWN_RANKS = """
import sys
import torch.distributed as dist, torch.multiprocessing as mp
import torch
def main(rank, path):
    dist.init_process_group("dualdist", init_method="file://" + path, rank=rank, world_size=2)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2] and "dualdist.c10d" in sys.modules
    print("rank", rank, dist.group.WORLD.members.transport.transport, flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), 2)
"""


def test_torch_finds_it_by_the_entry_point_and_a_program_may_start_its_ranks(launch: Launch) -> None:
    """The metadata is of this tree, as the installed one may be older."""
    declared = re.search(r'entry-points."torch.backends"]\n(\w+) = "(.+)"', (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    launch.write("site/found-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: found\nVersion: 1\n")
    launch.write("site/found-1.dist-info/entry_points.txt", f"[torch.backends]\n{declared[1]} = {declared[2]}\n")
    program = launch.write("program.py", STARTS_ITS_OWN_RANKS)
    path = f"{launch.env['PYTHONPATH']}:{launch.directory}/site"
    # A rank and a size that half a launcher left behind say nothing here: the program gives its own.
    env = {"PYTHONPATH": path, "WORLD_SIZE": "7"}
    outcome = launch([sys.executable, program, str(launch.directory / "meet")], env=env)
    assert sorted(outcome.stdout.split()) == ["0", "1", "rank", "rank", "shm", "shm"], str(outcome)
    bare = launch(
        [sys.executable, "-c", "import sys, torch; print('dualdist.c10d.process_group' in sys.modules)"], env=env
    )
    assert bare.stdout.strip() == "False"
    launch([sys.executable, "-c", "import dualdist.c10d"], env=env)  # before torch


@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_numbers_that_contradict_the_launchers_are_refused_where_the_launcher_connects(
    launch: Launch, backend: str
) -> None:
    program = launch.write(
        "swapped.py",
        "import dualdist.c10d, os, torch.distributed as dist\n"
        "dist.init_process_group('dualdist', rank=1 - int(os.environ['RANK']), world_size=2)\n",
    )
    outcome = launch([*EXEC_STARTS["mpirun"], program], env={BACKEND: backend}, check=False)
    assert outcome.rc != 0
    assert "init_process_group() was given rank 1 of 2, but" in outcome.stderr
    assert "DUALDIST_BACKEND=native" in outcome.stderr


# As tutorials, ignite and Accelerate call it; MPI's numbers are the launcher's whatever is passed.
NAMES_ITS_BACKEND = """
import os, sys, torch, torch.distributed as dist
from torch.distributed import init_process_group
if sys.argv[1] == "mpi":
    init_process_group("mpi", rank=0, world_size=0)
else:
    dist.init_process_group(backend=sys.argv[1], init_method="env://")
total = torch.ones(1)
dist.all_reduce(total)
dist.all_reduce(total, group=dist.new_group([0, 1]))
backend = dist.group.WORLD.members.transport
print(f"{dist.get_backend()} {total.item():g} over {backend.name} {backend.transport}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("asked", "answered"), [("gloo", "gloo"), ("mpi", "mpi"), ("nccl", "dualdist")])
def test_it_takes_the_place_of_a_scripts_backend_and_carries_groups(launch: Launch, asked: str, answered: str) -> None:
    program = launch.write("program.py", NAMES_ITS_BACKEND)
    outcome = launch([*EXEC_STARTS["mpirun"], "--torch-backend", "dualdist", program, asked])
    assert outcome.stdout.splitlines() == [f"{answered} 4 over native shm"] * 2, str(outcome)
    assert outcome.stderr.count(f'init_process_group("{asked}") takes the backend dualdist') == 1


@pytest.mark.parametrize(
    ("asked", "on_cpus", "on_gpus"),
    [
        ("gloo", True, True),
        ("MPI", True, True),
        ("nccl", True, False),
        (None, True, False),
        ("cpu:gloo,cuda:nccl", True, False),
        ("cuda:nccl", False, False),
        ("dualdist", False, False),
        ("ucc", False, False),
    ],
)
def test_only_backends_that_tutorials_name_are_replaced(asked: str | None, on_cpus: bool, on_gpus: bool) -> None:
    assert is_replaced(asked, has_gpu=False) == on_cpus
    assert is_replaced(asked, has_gpu=True) == on_gpus


def test_dualdist_may_be_initialized_before_its_groups_and_each_is_connected_anew(launch: Launch) -> None:
    program = launch.write(
        "groups.py",
        "import torch, torch.distributed as dist, dualdist.c10d, dualdist as dd\n"
        "dd.init('native')\n"
        "for _ in range(5):\n"
        "    group, tensor = dist.new_group(backend='dualdist'), torch.ones(1)\n"
        "    dist.all_reduce(tensor, group=group)\n"
        "    dist.destroy_process_group(group)\n"
        "print(tensor.item(), flush=True)\n"
        "dd.shutdown()\n",
    )
    printed = launch([*Cell("torchrun", 2).start(), program]).stdout
    assert printed.split() == ["2.0"] * 2, printed


def test_dualdist_may_be_initialized_after_it(launch: Launch) -> None:
    """dd.init() then takes the same ranks, as with any process group of the program."""
    program = launch.write(
        "both.py",
        "import torch, torch.distributed as dist, dualdist.c10d, dualdist as dd\n"
        "dist.init_process_group('dualdist')\n"
        "dd.init()\n"
        "tensor = torch.ones(1)\n"
        "dist.all_reduce(tensor)\n"
        "print(dd.rank(), dd.size(), int(dd.allreduce(tensor, 'sum').item()), dd.transport(), flush=True)\n"
        "dd.shutdown()\n"
        "dist.destroy_process_group()\n",
    )
    printed = launch([*Cell("torchrun", 2).start(), program]).stdout
    assert sorted(printed.splitlines()) == ["0 2 4 shm", "1 2 4 shm"]

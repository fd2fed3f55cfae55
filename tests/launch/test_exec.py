"""Programs of torch.distributed and MPI, as they are, under `dualdist exec` and `dualdist run` by every launcher."""

import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.hosts import Hosts
from harness.jobs import REPORT_DIR, Launch, Outcome
from harness.mpi import OpenMPI, of_pypis_mpich
from harness.slurm import Slurm
from launch.running import AS_ROOT, EXEC, EXEC_STARTS, LAUNCHERS, RUN, collected
from launch.torch_program import STEPS, ToyModel

PROGRAM = str(Path(__file__).with_name("torch_program.py"))
# DDP and FSDP2 add in float32, in an order of their own.
TOLERANCE = 1e-5


@cache
def trained_by_one_process(size: int) -> list[float]:
    """Return the sums of the parameters of torch_program.py, trained on the batches of all ranks at once."""
    torch.manual_seed(7)
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for generator in generators:
            batch, labels = torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)
            (torch.nn.functional.mse_loss(model(batch), labels) / size).backward()
        optimizer.step()
    return [each.double().sum().item() for each in model.state_dict().values()]


def check(reports: Sequence[Mapping[str, Any]], per_node: Sequence[int], kinds: Sequence[str] = ("ddp",)) -> None:
    """Check each rank's place, and that each kind of training ends where one process does."""
    places = [(node, local) for node, count in enumerate(per_node) for local in range(count)]
    for rank, (seen, (node, local)) in enumerate(zip(reports, places, strict=True)):
        place = {"rank": rank, "size": sum(per_node), "local_rank": local, "node_rank": node}
        wanted = {**place, "local_size": per_node[node]}
        assert {name: seen[name] for name in wanted} == wanted
        assert set(seen["trained"]) == set(kinds)
        for kind in kinds:
            assert seen["trained"][kind] == pytest.approx(
                trained_by_one_process(sum(per_node)), rel=TOLERANCE, abs=TOLERANCE
            )


@pytest.mark.smoke("mpirun")
@pytest.mark.parametrize("launcher", EXEC_STARTS)
def test_ddp_and_fsdp_train_under_every_launcher(launch: Launch, launcher: str) -> None:
    check(launch.reports([*EXEC_STARTS[launcher], PROGRAM, "fsdp"], 2), (2,), ("ddp", "fsdp"))


@pytest.mark.smoke("none-1+1")
@pytest.mark.parametrize(
    ("mpi", "options", "per_node"),
    [
        pytest.param("none", ("-N2", "-n2"), (1, 1), id="none-1+1"),
        pytest.param("none", ("-N1", "-n2"), (2,), id="none-2"),
        pytest.param("pmi2", ("-N2", "-n4"), (3, 1), id="pmi2-3+1"),
        pytest.param("pmix", ("-N1", "-n2"), (2,), id="pmix-2"),
    ],
)
def test_ddp_trains_under_srun(
    slurm: Slurm, launch: Launch, mpi: str, options: Sequence[str], per_node: Sequence[int]
) -> None:
    check(launch.reports([*slurm.srun(*options, mpi=mpi), *EXEC, PROGRAM], sum(per_node), env=slurm.env), per_node)


def test_mpirun_on_the_nodes_of_an_allocation_meets_through_mpi(slurm: Slurm, openmpi: OpenMPI, launch: Launch) -> None:
    line = shlex.join([*openmpi.run(2, "--map-by", "node"), *EXEC, PROGRAM])
    batch = launch.write("batch.sh", f"#!/bin/sh\n{line}\n")
    check(launch.reports([*slurm.sbatch("-N2", "-n2"), batch], 2, env=slurm.env), (1, 1))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_dualdist_run_starts_a_program_of_torch(launch: Launch, launcher: str) -> None:
    check(launch.reports([*RUN, "-np", "2", "--launcher", launcher, PROGRAM], 2, env=AS_ROOT), (2,))


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_dualdist_run_starts_it_on_two_hosts(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    def run(env: Mapping[str, str]) -> Outcome:
        words = ["-H", "hosta:2,hostb:1", "--launcher", launcher, "--network-interface", "eth0"]
        words += ["--env", f"{REPORT_DIR}={env[REPORT_DIR]}", PROGRAM]
        return launch(two_hosts.on(0, *RUN, *words), env=two_hosts.env)

    check(collected(launch, 3, run), (2, 1))


USES_MPI = "from mpi4py import MPI; import os; print(MPI.COMM_WORLD.allreduce(1), os.environ['WORLD_SIZE'])"


@pytest.mark.parametrize(("launcher", "env"), [("mpirun", {}), ("mpich", of_pypis_mpich())])
def test_mpi_is_left_to_the_program(launch: Launch, launcher: str, env: Mapping[str, str]) -> None:
    outcome = launch([*EXEC_STARTS[launcher], launch.write("own.py", USES_MPI)], env=env)
    assert "".join(outcome.stdout.split()) == "2222"  # lines of two ranks may mix


HURRIES = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
sys.setswitchinterval(1000)  # Gloo's threads wait for the interpreter until it ends
dist.all_gather([torch.ones(1) for _ in range(2)], torch.ones(1))
"""


def test_a_rank_that_ends_right_after_a_collective_is_not_aborted(launch: Launch) -> None:
    program = launch.write("hurries.py", HURRIES)
    for _ in range(2):
        launch([*EXEC_STARTS["mpirun"], program])


ENDS = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(3)\ntime.sleep(100)\n"


def test_an_exit_code_ends_the_job_as_without_exec(launch: Launch) -> None:
    assert launch([*EXEC_STARTS["mpirun"], launch.write("ends.py", ENDS)], check=False).rc == 3
    outcome = launch([*EXEC_STARTS["mpirun"], "--", "sh", "-c", "exit $((RANK * 5))"], check=False)
    assert outcome.rc == 5, str(outcome)

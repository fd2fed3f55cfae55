"""The README's programs and command lines run as they are printed there."""

import shlex
from collections.abc import Mapping

import pytest
from harness.base_env import ROOT
from harness.jobs import Launch, Outcome
from harness.slurm import Slurm
from launch.running import AS_ROOT, TORCHRUN, blocks, sides

README = ROOT / "README.md"
STARTS, COMMANDS, DOCTOR, COMPARE = (text.splitlines() for text in blocks(README, "bash"))
ONE_PROCESS, DDP, HOROVOD = blocks(README, "diff")
# Before and after each diff; ranks begin with models of their own, and print the parameters that they end with.
HEAD = "import torch\n"
SEEDED = "import torch.distributed, dualdist as dd\ntorch.manual_seed(int(__import__('os').environ.get('RANK', 0)))\n"
OF_HOROVOD = """
model = torch.nn.Linear(8, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
"""
TRAIN = """
for step in range(3):
    x = torch.arange(8.0) + step
    optimizer.zero_grad()
    (model(x) - 1).square().sum().mul(1e-3).backward()
    optimizer.step()
text = str(sorted((name.removeprefix("module."), each.tolist()) for name, each in model.state_dict().items()))
print(text + "\\n", end="", flush=True)  # one write, as ranks share the output
if torch.distributed.is_initialized() and not dd.is_initialized():  # Gloo aborts now and then as DDP's script ends
    torch.distributed.barrier()
    __import__("os")._exit(0)
"""


def start(launch: Launch, line: str, env: Mapping[str, str]) -> Outcome:
    launch.write("train.py", blocks(README, "python")[0])
    return launch(shlex.split(line), env={**AS_ROOT, **env})


def check_example(outcome: Outcome, line: str) -> None:
    """It prints one line, of a loss that is about 9 at first."""
    ranks = 2 if "2" in line.split() else 1
    assert outcome.stdout.count(f"{ranks} ranks, ") == 1, str(outcome)
    assert float(outcome.stdout.split("loss ")[1]) < 1.0, str(outcome)


@pytest.mark.parametrize("line", [line for line in STARTS if not line.startswith("srun")])
def test_the_example_trains(launch: Launch, line: str) -> None:
    check_example(start(launch, line, {}), line)


@pytest.mark.parametrize("line", [line for line in STARTS if line.startswith("srun")])
def test_the_example_trains_under_slurm(slurm: Slurm, launch: Launch, line: str) -> None:
    check_example(start(launch, line, slurm.env), line)


@pytest.mark.smoke
def test_the_other_lines_are_known() -> None:
    """Of `make` tests/unit/test_readmes.py knows the targets; test_doctor.py runs doctor's second line."""
    assert COMMANDS == ["make demo", "make test"]
    assert DOCTOR == ["dualdist doctor", "dualdist doctor --run -np 2"]


@pytest.mark.smoke
@pytest.mark.parametrize("line", [DOCTOR[0], f"{COMPARE[0]} --dry-run"])
def test_a_line_runs(launch: Launch, line: str) -> None:
    """doctor may find something: CI's torchvision does not fit torch."""
    outcome = launch(shlex.split(line), check=False)
    assert outcome.rc in ((0, 1) if "doctor" in line else (0,)), str(outcome)
    assert outcome.stdout


def parameters(outcome: Outcome, ranks: int) -> str:
    """Return what all ranks printed."""
    lines = outcome.stdout.splitlines()
    assert len(lines) == ranks, str(outcome)
    assert len(set(lines)) == 1, str(outcome)
    return lines[0]


def test_a_script_for_one_process_ends_with_the_same_parameters_on_one_rank(launch: Launch) -> None:
    before, after = sides(launch, ONE_PROCESS, HEAD + SEEDED + "{}" + TRAIN)
    alone = parameters(launch(["python", before]), 1)
    assert parameters(launch(["python", after]), 1) == alone
    assert parameters(launch([*TORCHRUN, after]), 2) == alone  # each rank has the same batch


def test_a_ddp_script_ends_with_the_same_parameters(launch: Launch) -> None:
    before, after = sides(launch, DDP, HEAD + SEEDED + "{}" + TRAIN)
    assert parameters(launch([*TORCHRUN, after]), 2) == parameters(launch([*TORCHRUN, before]), 2)


def test_a_horovod_script_ends_with_the_same_parameters_changed_or_not(launch: Launch) -> None:
    before, after = sides(launch, HOROVOD, HEAD + SEEDED + "{}" + OF_HOROVOD + TRAIN)
    assert f"`dualdist run -np 2 --as-horovod {'script.py'}`" in README.read_text()
    unchanged = parameters(launch(["dualdist", "run", "-np", "2", "--as-horovod", before]), 2)
    assert parameters(launch([*TORCHRUN, after]), 2) == unchanged
    assert parameters(launch([*TORCHRUN, "-m", "dualdist.hvd", before]), 2) == unchanged

"""The README's programs and command lines run as they are printed there."""

import json
import shlex
from collections.abc import Mapping

import pytest
from harness.base_env import ROOT
from harness.jobs import Launch, Outcome
from harness.slurm import Slurm
from launch.running import AS_ROOT, TORCHRUN, blocks, sides

README = ROOT / "README.md"
COMMANDS, DOCTOR, STARTS, COMPARE = (text.splitlines() for text in blocks(README, "bash"))
ONE_PROCESS, DDP, HOROVOD = blocks(README, "diff")
# Before and after each diff; ranks begin with models of their own, and print the parameters that they end with.
SEEDED = "import os, torch\ntorch.manual_seed(int(os.environ.get('RANK', 0)))\n"
OF_HOROVOD = """
model = torch.nn.Linear(8, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(3):
    x = torch.arange(8.0) + step + hvd.rank()
    optimizer.zero_grad()
    (model(x) - 1).square().sum().mul(1e-3).backward()
    optimizer.step()
"""
SHOWN = """
text = str(torch.cat([each.flatten() for each in model.state_dict().values()]).tolist())
print(text + "\\n", end="", flush=True)  # one write, as ranks share the output
if "dd" not in globals() and "hvd" not in globals():  # Gloo aborts now and then as DDP's script ends
    os._exit(0)
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


def parameters(outcome: Outcome, ranks: int) -> list[float]:
    """Return what all ranks printed."""
    lines = outcome.stdout.splitlines()
    assert len(lines) == ranks, str(outcome)
    assert len(set(lines)) == 1, str(outcome)
    found: list[float] = json.loads(lines[0])
    return found


def test_a_single_process_script_trains_the_same_model_on_one_rank_and_on_two(launch: Launch) -> None:
    """In one order, so that a step of two ranks has the samples of a step of one process with twice the batch."""
    in_order = ONE_PROCESS.replace(", shuffle=True", "").replace('remainder="drop"', 'remainder="drop", shuffle=False')
    whole, _ = sides(launch, in_order.replace("batch_size=32", "batch_size=64"), SEEDED + "{}" + SHOWN)
    expected = parameters(launch(["python", whole]), 1)
    before, after = sides(launch, in_order, SEEDED + "{}" + SHOWN)
    assert parameters(launch(["python", after]), 1) == parameters(launch(["python", before]), 1)
    assert parameters(launch([*TORCHRUN, after]), 2) == pytest.approx(expected, abs=1e-6)  # sums in another order


def test_a_ddp_script_ends_with_the_same_parameters(launch: Launch) -> None:
    before, after = sides(launch, DDP, SEEDED + "{}" + SHOWN)
    assert parameters(launch([*TORCHRUN, after]), 2) == parameters(launch([*TORCHRUN, before]), 2)


def test_a_horovod_script_ends_with_the_same_parameters_changed_or_not(launch: Launch) -> None:
    before, after = sides(launch, HOROVOD, SEEDED + "{}" + OF_HOROVOD + SHOWN)
    assert f"`dualdist run -np 2 --as-horovod {'script.py'}`" in README.read_text()
    unchanged = parameters(launch(["dualdist", "run", "-np", "2", "--as-horovod", before]), 2)
    assert parameters(launch([*TORCHRUN, after]), 2) == unchanged
    assert parameters(launch([*TORCHRUN, "-m", "dualdist.hvd", before]), 2) == unchanged

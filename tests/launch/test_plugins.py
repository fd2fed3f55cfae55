"""Libraries on top of torch.distributed, in their current releases and as they are, under `dualdist exec`.

`pip install '.[plugins]'` installs them. DeepSpeed is tried by hand: it compiles parts of itself when it starts, and
leaves files in /dev/shm.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.base_env import ROOT
from harness.effort import Effort
from harness.jobs import Launch
from harness.slurm import Slurm
from launch.running import EXEC, EXEC_STARTS

# Lightning and Transformers import torchvision where it is installed, and here it need not fit torch.
PROGRAM = str(Path(__file__).with_name("plugin_program.py"))
# The example, the launcher that starts it over Gloo, and the backend of the process group `dualdist`: ignite wraps no
# model in DDP on a backend whose name it does not know.
EXAMPLES = {
    "accelerate": ("with_accelerate.py", "mpirun", "native"),
    "lightning.fabric": ("with_fabric.py", "torchrun", "mpi"),
    "lightning": ("with_lightning.py", "mpirun", "native"),
    "ignite": ("with_ignite.py", "horovodrun", ""),
    "transformers": ("with_transformers.py", "torchrun", "mpi"),
}
# These look for Slurm's variables themselves.
READS_SLURM = ("ignite", "lightning")
pytestmark = pytest.mark.full


def need(library: str) -> None:
    """Skip the test where the library is not installed."""
    if find_spec(library.partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed: pip install 'dualdist[plugins]'")


def losses(
    launch: Launch, start: Sequence[str], library: str, env: dict[str, str] | None = None, options: Sequence[str] = ()
) -> list[str]:
    program = str(ROOT / "examples" / "plugins" / EXAMPLES[library][0])
    printed = launch([*start, PROGRAM, *options, program], env=env, timeout_s=250).stdout
    return re.findall(r"2 ranks, loss (\d\.\d+)", printed)


@pytest.mark.parametrize("library", EXAMPLES)
def test_a_library_trains_on_two_ranks_with_the_same_loss_under_every_launcher(
    launch: Launch, effort: Effort, library: str
) -> None:
    """One line of two ranks: without the variables most would train two jobs of one rank.

    `dualdist exec` sets the same variables under every launcher, as test_exec.py shows: each library is tried over Gloo
    under one of them, and over the process group `dualdist` under torchrun or mpirun; with --long under all.
    """
    need(library)
    _, over_gloo, group = EXAMPLES[library]
    (loss,) = losses(launch, EXEC_STARTS[over_gloo], library)
    for launcher in effort([], {"torchrun", "mpirun", "horovodrun"} - {over_gloo}):
        assert losses(launch, EXEC_STARTS[launcher], library) == [loss]
    if group:
        groups = {"native": "torchrun", "mpi": "mpirun"}
        for backend in effort([group], list(groups)):
            env = {"DUALDIST_BACKEND": backend}
            assert losses(launch, EXEC_STARTS[groups[backend]], library, env, ["--dualdist"]) == [loss]


@pytest.mark.parametrize("library", EXAMPLES)
def test_a_library_trains_on_two_nodes_of_slurm(slurm: Slurm, launch: Launch, effort: Effort, library: str) -> None:
    effort.require_long(unless=library in READS_SLURM)
    need(library)
    assert len(losses(launch, [*slurm.srun("-N2", "-n2"), *EXEC], library, dict(slurm.env))) == 1


LIGHTNING = """
import lightning, sys, torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.strategies import DDPStrategy as TrainersDDPStrategy
import dualdist.c10d
fabric = Fabric(strategy=DDPStrategy(process_group_backend="dualdist"), devices=2)
fabric.launch()
print(torch.distributed.get_backend(), fabric.all_reduce(torch.ones(1), reduce_op="sum").item())
assert TrainersDDPStrategy(process_group_backend="dualdist").process_group_backend == "dualdist"
sys.stdout.flush()
torch.distributed.destroy_process_group()
"""


def test_lightning_takes_the_backend_by_its_name(launch: Launch) -> None:
    need("lightning")
    printed = launch([*EXEC_STARTS["torchrun"], PROGRAM, launch.write("named.py", LIGHTNING)], timeout_s=250).stdout
    assert printed.count("dualdist 2.0") == 2, printed


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_accelerates_own_test_script_passes(launch: Launch, effort: Effort, launcher: str) -> None:
    effort.require_long(unless=launcher == "mpirun")
    need("accelerate")
    outcome = launch([*EXEC_STARTS[launcher], "-m", "accelerate.test_utils.scripts.test_script"], timeout_s=250)
    assert "Num processes: 2" in outcome.stdout, str(outcome)
    assert "Test reinstantiated state" in outcome.stdout

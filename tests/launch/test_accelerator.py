"""What is for GPUs, on the simulated accelerator: through host memory, and by a collective library as NCCL is one."""

import sys
from pathlib import Path

import pytest
from harness.accelerator.build import build
from harness.jobs import Launch

PROGRAM = str(Path(__file__).with_name("accelerator_program.py"))
LIBRARY = "simccl"
pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("what", "library"),
    [("steps,order,resume", ""), ("steps,order,resume,end,join,late", LIBRARY)],
    ids=["through host memory", "by a library"],
)
def test_two_ranks_on_an_accelerator(launch: Launch, what: str, library: str, tmp_path: Path) -> None:
    build()
    command = ["torchrun", "--standalone", "--nproc-per-node=2", PROGRAM, what, "simulated", library, str(tmp_path)]
    assert launch(command, timeout_s=120).stdout.split() == [what, "holds"] * 2


def test_one_rank_needs_no_network(launch: Launch, tmp_path: Path) -> None:
    build()
    code = "import dualdist as dd; from harness.accelerator import device; dd.init(); print(dd.device(), dd.allreduce("
    found = launch([sys.executable, "-c", f"{code}__import__('torch').ones(2, device=dd.device())).tolist())"])
    assert found.stdout.split() == ["simulated:0", "[1.0,", "1.0]"]

"""A script that imports horovod.torch runs unchanged, under every launcher and on both backends."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import problem
from harness.jobs import Launch
from harness.mpi import OpenMPI
from launch.running import RUN, TORCHRUN

SCRIPT = str(Path(__file__).with_name("horovod_script.py"))
HVD = ("-m", "dualdist.hvd")
SIZE = 2
WORDS = ("--epochs", "-np", "3", "-m")
"""Arguments of the script that launchers have, too."""
STARTS = {
    "torchrun": [*TORCHRUN, *HVD, SCRIPT],
    "horovodrun": ["horovodrun", "--gloo", "-np", str(SIZE), sys.executable, *HVD, SCRIPT],
    "mpirun": [*OpenMPI("mpirun").run(SIZE), sys.executable, *HVD, SCRIPT],
    "dualdist run": [*RUN, "-np", str(SIZE), "--as-horovod", SCRIPT],
    "a module": [*RUN, "-np", str(SIZE), "--launcher", "mpirun", "--as-horovod", "-m", "launch.horovod_script"],
}


def check(reports: list[dict[str, Any]], size: int, backend: str) -> None:
    for rank, seen in enumerate(reports):
        assert seen["parameters"] == pytest.approx(problem.trained_by_one_process(size), rel=1e-6, abs=1e-6)
        assert {name: seen[name] for name in seen if name != "parameters"} == {
            "rank": rank,
            "size": size,
            "local_rank": rank,
            "sum": [(1 << size) - 1, size << 40],
            "mean": (size - 1) / 2,
            "gathered": [sender for sender in range(size) for _ in range(sender + 1)],
            "object": {"root": 0},
            "version": "0.28.1",
            "face": "dualdist",
            "backend": backend,
            "arguments": list(WORDS),
        }
    assert len({tuple(seen["parameters"]) for seen in reports}) == 1


@pytest.mark.parametrize(
    ("start", "backend"), [*((start, "native") for start in STARTS), ("torchrun", "horovod"), ("mpirun", "horovod")]
)
def test_horovod_script_runs_unchanged(launch: Launch, start: str, backend: str) -> None:
    check(launch.reports([*STARTS[start], *WORDS], SIZE, env={"DUALDIST_BACKEND": backend}), SIZE, backend)


def test_horovod_script_runs_alone_without_a_launcher(launch: Launch) -> None:
    check(launch.reports([sys.executable, *HVD, SCRIPT, *WORDS], 1), 1, "native")


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_horovod_run_starts_ranks_from_a_script_under_dualdist_hvd(launch: Launch, backend: str) -> None:
    script = launch.write(
        "script.py",
        "import horovod, torch\n"
        "import horovod.torch as hvd\n"
        "scale = 10\n"
        "def work(first, last):\n"
        "    hvd.init()\n"
        "    import horovod.torch as again\n"
        "    assert again is hvd\n"
        "    return hvd.rank(), hvd.allreduce(torch.tensor(scale * (first + last)), op=hvd.Sum).item()\n"
        "print('once')\n"
        "print(horovod.run(work, (1,), {'last': 2}, num_proc=3, use_gloo=True))\n",
    )
    outcome = launch([sys.executable, *HVD, script], env={"DUALDIST_BACKEND": backend})
    assert outcome.stdout.splitlines() == ["once", "[(0, 90), (1, 90), (2, 90)]"]


# What docs/pages/from-horovod-2.md says: a new optimizer's weights and count of steps after its state was broadcast, a
# mean of 2**-24 and 0 that was sent in float16, the average of 49 ones, an Adasum of two orthogonal steps.
DIFFERS = """
import json, sys, torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
seen = {"weight": model.weight[0, 0].item(), "steps": [int(each["step"]) for each in optimizer.state.values()]}
other = torch.nn.Linear(1, 1, bias=False)
wrapped = hvd.DistributedOptimizer(
    torch.optim.SGD(other.parameters(), lr=1.0), other.named_parameters(), compression=hvd.Compression.fp16
)
other(torch.tensor([2.0**-24 * (hvd.rank() == 0)])).sum().backward()
wrapped.synchronize()
seen["fp16"] = other.weight.grad.item()
seen["integers"] = hvd.allreduce(torch.ones(1, dtype=torch.int64), name="ones").item()
seen["epoch"] = hvd.broadcast(torch.tensor(7 * (hvd.rank() == 0)), root_rank=0, name="epoch").item()
seen["sum"] = hvd.allreduce(torch.ones(1), average=False, name="sum").item()
try:
    hvd.allreduce(torch.ones(1), average=False, op=hvd.Sum)
except ValueError:
    seen["both"] = "ValueError"
if hvd.mpi_enabled():
    seen["adasum"] = hvd.allreduce(torch.eye(2)[hvd.rank()], op=hvd.Adasum, name="adasum").tolist()
if hvd.rank() == 0:
    print(json.dumps(seen))
hvd.shutdown()
"""


def test_what_the_manual_says_that_differs_from_horovod_does(launch: Launch, openmpi: OpenMPI) -> None:
    script, start = launch.write("differs.py", DIFFERS), [*openmpi.run(SIZE), sys.executable]
    theirs, on_native, on_horovod = (
        json.loads(launch(argv, env=env).stdout)
        for argv, env in (
            ([*start, script], {}),
            ([*start, *HVD, script], {"DUALDIST_BACKEND": "native"}),
            ([*start, *HVD, script], {"DUALDIST_BACKEND": "horovod"}),
        )
    )
    same = {"integers": 1, "epoch": 7, "sum": 2.0, "both": "ValueError"}
    adasum = {"adasum": [1.0, 1.0]}
    assert theirs == {"weight": pytest.approx(0.95), "steps": [1], "fp16": 0.0, **same, **adasum}
    assert on_native == {"weight": 1.0, "steps": [], "fp16": 2.0**-25, **same}
    assert on_horovod == {**on_native, **adasum}

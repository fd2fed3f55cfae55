"""A script that imports horovod.torch runs unchanged, under every launcher and on both backends."""

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

"""The real thing: CUDA or ROCm, each test skipped on machines without what it needs; `make test-gpu`."""

import json
import sys
from pathlib import Path

import pytest
import torch
from harness.jobs import Launch

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(GPUS < 1, reason="torch sees no GPU here")
needs_gpus = pytest.mark.skipif(GPUS < 2, reason="torch sees fewer than two GPUs here")
THROUGH_HOST = {"DUALDIST_TRANSPORT": "shm"}


def run(launch: Launch, what: str, ranks: int, folder: Path, env: dict[str, str] | None = None) -> None:
    library = "" if env else "nccl"
    program = [str(HERE / "accelerator_program.py"), what, "cuda", library, str(folder)]
    found = launch(["torchrun", "--standalone", f"--nproc-per-node={ranks}", *program], timeout_s=600, env=env or {})
    assert found.stdout.split() == [what, "holds"] * ranks


@needs_gpu
@pytest.mark.parametrize("what", ["streams", "capture"])
def test_gradients_on_a_gpu(launch: Launch, what: str) -> None:
    assert launch([sys.executable, str(HERE / "gpu_program.py"), what], timeout_s=120).stdout.split() == [what, "holds"]


@needs_gpu
@pytest.mark.parametrize("what", ["steps,order,resume", "laws"])
def test_two_ranks_share_a_gpu_through_host_memory(launch: Launch, what: str, tmp_path: Path) -> None:
    run(launch, what, 2, tmp_path, THROUGH_HOST)


@needs_gpu
@pytest.mark.parametrize("what", ["steps,resume,end,beside", "laws"])
def test_a_rank_for_each_gpu(launch: Launch, what: str, tmp_path: Path) -> None:
    run(launch, what, GPUS, tmp_path)


@needs_gpus
def test_two_ranks_on_two_gpus(launch: Launch, tmp_path: Path) -> None:
    run(launch, "order,join,late", 2, tmp_path)


@needs_gpu
def test_exec_gives_each_rank_a_gpu(launch: Launch) -> None:
    code = "import os, torch; torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); print(torch.cuda.current_device())"
    words = ["dualdist", "run", "-np", str(GPUS), "--launcher", "torchrun", "--", sys.executable, "-c", code]
    assert sorted(launch(words, timeout_s=120).stdout.split()) == [str(number) for number in range(GPUS)]


@needs_gpu
def test_the_benchmark_of_a_step_measures_the_gpu(launch: Launch, tmp_path: Path) -> None:
    report = tmp_path / "step.json"
    words = ["--device", "cuda", "-np", str(GPUS), "--model", "mlp", "--rounds", "3", "--launches", "1"]
    launch(["dualdist", "bench", "step", *words, "--backend", "native", "--json", str(report)], timeout_s=300)
    assert json.loads(report.read_text())["versions"]["NCCL"]

"""Gradients on a GPU; skipped on machines without one."""

import sys
from pathlib import Path

import pytest
import torch
from harness.jobs import Launch

PROGRAM = str(Path(__file__).with_name("gpu_program.py"))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


@needs_gpu
@pytest.mark.parametrize("what", ["streams", "capture"])
def test_gradients_on_a_gpu(launch: Launch, what: str) -> None:
    assert launch([sys.executable, PROGRAM, what], timeout_s=120).stdout.split() == [what, "holds"]

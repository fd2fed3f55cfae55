"""DeepSpeed's allreduce in shared memory, as a contender of `dualdist bench allreduce` where it is installed.

https://github.com/deepspeedai/DeepSpeed: deepspeed.comm.inference_all_reduce, whose C++ extension is compiled at its
first use. It sums in place, for ranks of one host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

import dualdist as dd
from dualdist.utils.variables import temporary_variables

# The vector instructions that it needs, as its vector_kernel_level() numbers them: 1 for AVX2, 2 for AVX-512 BW.
LEVELS = {"float32": 1, "bfloat16": 2, "float16": 2}


def load_allreduces() -> tuple[dict[str, Callable[[torch.Tensor], object]], str]:
    """Connect DeepSpeed's shared memory; every rank calls this, once in a job of ranks of one host.

    Returns:
        Its sum in place by dtype, none where it is not installed; and why it is missing where it is installed.
    """
    if not all(dd.allgather_object(find_spec("deepspeed") is not None)):
        return {}, ""
    variables: dict[str, str | None] = {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(dd.size()),  # or it would expect more hosts
        "MASTER_ADDR": "dualdist",  # this and the port are in the name of its shared memory
        "MASTER_PORT": dd.broadcast_object(str(os.getpid())),
    }
    with temporary_variables(os.environ, variables):
        extension, reason = _build()
        if reason := next(filter(None, dd.allgather_object(reason)), ""):
            return {}, f"DeepSpeed's allreduce is left out: {reason}"
        extension.initialize(dd.size(), dd.rank())
        dd.barrier()  # all have mapped it; DeepSpeed leaves the files
        for file in Path("/dev/shm").glob(
            f"deepspeed_allreduce_buffer_*_dualdist_{variables['MASTER_PORT']}_{dd.rank()}"
        ):
            file.unlink()
        level = extension.vector_kernel_level()
    call = torch.ops.deepspeed.inference_all_reduce_
    return {dtype: call for dtype, needed in LEVELS.items() if level >= needed}, ""


def _build() -> tuple[Any, str]:
    """Return DeepSpeed's extension, which it compiles, or why it cannot."""
    try:
        with redirect_stdout(StringIO()):
            from deepspeed.comm.torch import build_shm_op

            extension = build_shm_op()
    except Exception as error:  # the compiler, Ninja or an import may fail in any way
        return None, f"it does not build here ({error})"
    return extension, "" if extension is not None else "it does not support this machine"

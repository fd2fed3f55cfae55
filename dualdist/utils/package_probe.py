"""Probes of installed packages and tools in subprocesses: imports are slow, and may crash."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TORCH_S = 120.0

TORCH_PROGRAM = """
import json, os, warnings
from contextlib import suppress
from importlib.util import find_spec
import torch
found = {
    "version": torch.__version__, "git": torch.version.git_version, "cxx11_abi": torch.compiled_with_cxx11_abi(),
    "cuda": torch.version.cuda, "hip": torch.version.hip,
    "headers": os.path.join(os.path.dirname(torch.__file__), "include"),
}
with suppress(Exception):
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
found["gpu_warning"] = str(caught[0].message) if caught else ""
with suppress(Exception):
    from dualdist.utils.torchvision_import import load_operators
    if (vision := find_spec("torchvision")) is not None:
        found["has_vision_operators"] = load_operators(vision.submodule_search_locations)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class TorchProbe:
    """The installed torch.

    Attributes:
        nccl: Version of its NCCL.
        gpus: Number of GPUs that it can use.
        gpu_warning: Its warning when it looked for them.
        has_vision_operators: True if torchvision's compiled operators load; None without torchvision.
    """

    version: str
    git: str = ""
    cxx11_abi: bool = True
    cuda: str | None = None
    hip: str | None = None
    headers: str = ""
    nccl: str | None = None
    gpus: int = 0
    gpu_warning: str = ""
    has_vision_operators: bool | None = None


def probe_torch(environ: Mapping[str, str]) -> TorchProbe | str:
    """Return the installed torch, or the last line of the error if it cannot be imported."""
    found = run_probe(TORCH_PROGRAM, environ, TORCH_S)
    return found if isinstance(found, str) else TorchProbe(**found)


def run_probe(program: str, environ: Mapping[str, str], timeout_s: float) -> dict[str, Any] | str:
    """Return the JSON object that a Python program prints last, or the last line of its error."""
    code, output = run_tool([sys.executable, "-c", program], environ, timeout_s)
    lines = output.strip().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return lines[-1] if lines else f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def run_tool(argv: list[str], environ: Mapping[str, str] | None = None, timeout_s: float = 60) -> tuple[int, str]:
    """Return the exit code and combined output; 127 if the program cannot be started or does not end in time."""
    null, pipe, stdout = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    try:
        done = subprocess.run(
            argv, env=environ, stdin=null, stdout=pipe, stderr=stdout, timeout=timeout_s, errors="replace", check=False
        )
    except subprocess.TimeoutExpired:
        return 127, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout

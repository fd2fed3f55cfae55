"""Probes of torch, Horovod and mpi4py, each in a subprocess: imports are slow, and may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TORCH_S, HOROVOD_S, MPI4PY_S = 120.0, 120.0, 60.0

TORCH_PROGRAM = """
import json, os, warnings
import torch
found = {
    "version": torch.__version__, "git": torch.version.git_version, "cxx11_abi": torch.compiled_with_cxx11_abi(),
    "cuda": torch.version.cuda, "hip": torch.version.hip,
    "headers": os.path.join(os.path.dirname(torch.__file__), "include"),
    "has_distributed": torch.distributed.is_available(),
}
try:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    found["nccl"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
found["gpu_warning"] = str(caught[0].message) if caught else ""
try:
    from importlib.util import find_spec
    from dualdist.utils.torchvision_import import load_operators
    vision = find_spec("torchvision")
    found["has_vision_operators"] = None if vision is None else load_operators(vision.submodule_search_locations)
except Exception:
    found["has_vision_operators"] = None
print(json.dumps(found))
"""
HOROVOD_PROGRAM = """
import json
import horovod.torch as hvd
print(json.dumps({"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": str(hvd.nccl_built() or "")}))
"""
# Querying the library's version does not initialize MPI, which could end the process, and needs no launcher.
MPI4PY_PROGRAM = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libmpi" in line}
print(json.dumps({"library": MPI.Get_library_version().strip("\\0 \\n"), "files": sorted(files)}))
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
    has_distributed: bool = True
    nccl: str | None = None
    gpus: int = 0
    gpu_warning: str = ""
    has_vision_operators: bool | None = None


@dataclass(frozen=True)
class HorovodProbe:
    """The build options of the installed Horovod; `nccl` is the version's number, such as "21805", or ""."""

    gloo: bool
    mpi: bool
    nccl: str


@dataclass(frozen=True)
class Mpi4pyProbe:
    """The MPI that mpi4py uses: its version string, and its library files."""

    library: str
    files: tuple[str, ...] = ()


def probe_torch(environ: Mapping[str, str]) -> TorchProbe | str:
    """Return the installed torch, or the last line of the error if it cannot be imported."""
    found = _run(TORCH_PROGRAM, environ, TORCH_S)
    return found if isinstance(found, str) else TorchProbe(**found)


def probe_horovod(environ: Mapping[str, str]) -> HorovodProbe | str:
    """Return the installed Horovod, or the last line of the error if it cannot be imported."""
    found = _run(HOROVOD_PROGRAM, environ, HOROVOD_S)
    return found if isinstance(found, str) else HorovodProbe(**found)


def probe_mpi4py(environ: Mapping[str, str]) -> Mpi4pyProbe | str:
    """Return mpi4py's MPI, or the last line of the error if it cannot be imported."""
    found = _run(MPI4PY_PROGRAM, environ, MPI4PY_S)
    return found if isinstance(found, str) else Mpi4pyProbe(found["library"], tuple(found["files"]))


def _run(program: str, environ: Mapping[str, str], timeout_s: float) -> dict[str, Any] | str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return str(error)
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return found if isinstance(found, dict) else str(found)
    except (IndexError, ValueError):
        ending = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return (done.stderr.strip().splitlines() or [ending])[-1]

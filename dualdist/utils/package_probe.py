"""What torch, Horovod and mpi4py say of themselves, each in a process of its own: it may be broken, and is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TORCH_S, HOROVOD_S, MPI4PY_S = 120.0, 120.0, 60.0

ASK_TORCH = """
import json, os, warnings
import torch
said = {
    "version": torch.__version__, "git": torch.version.git_version, "cxx11_abi": torch.compiled_with_cxx11_abi(),
    "cuda": torch.version.cuda, "hip": torch.version.hip,
    "headers": os.path.join(os.path.dirname(torch.__file__), "include"),
    "has_distributed": torch.distributed.is_available(),
}
try:
    said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    said["nccl"] = None
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    said["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
said["gpu_warning"] = str(told[0].message) if told else ""
try:
    from importlib.util import find_spec
    from dualdist.utils.torchvision_import import load_operators
    vision = find_spec("torchvision")
    said["has_vision_operators"] = None if vision is None else loads_operators(vision.submodule_search_locations)
except Exception:
    said["has_vision_operators"] = None
print(json.dumps(said))
"""
ASK_HOROVOD = """
import json
import horovod.torch as hvd
print(json.dumps({"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": str(hvd.nccl_built() or "")}))
"""
# Naming its library starts no MPI, which could end the process, and needs no launcher.
ASK_MPI4PY = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libmpi" in line}
print(json.dumps({"library": MPI.Get_library_version().strip("\\0 \\n"), "files": sorted(files)}))
"""


@dataclass(frozen=True)
class TorchProbe:
    """The torch that `import torch` finds. `nccl` is the version it has; `gpus` are those that it can use.

    `gpu_warning` is what it said when it looked for them. `has_vision_operators` tells whether torchvision's compiled
    part loads beside it, None where there is no torchvision.
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
    """With what the installed Horovod was built; `nccl` is that version's number, as 21805, or ""."""

    gloo: bool
    mpi: bool
    nccl: str


@dataclass(frozen=True)
class Mpi4pyProbe:
    """The MPI that mpi4py would use: what it calls itself, and its files."""

    library: str
    files: tuple[str, ...] = ()


def probe_torch(environ: Mapping[str, str]) -> TorchProbe | str:
    """What torch says, or the last words of a Python that cannot import it."""
    said = _ask(ASK_TORCH, environ, TORCH_S)
    return said if isinstance(said, str) else TorchProbe(**said)


def probe_horovod(environ: Mapping[str, str]) -> HorovodProbe | str:
    """What Horovod says, or the last words of a Python that cannot import it."""
    said = _ask(ASK_HOROVOD, environ, HOROVOD_S)
    return said if isinstance(said, str) else HorovodProbe(**said)


def probe_mpi4py(environ: Mapping[str, str]) -> Mpi4pyProbe | str:
    """What mpi4py says, or the last words of a Python that cannot import it."""
    said = _ask(ASK_MPI4PY, environ, MPI4PY_S)
    return said if isinstance(said, str) else Mpi4pyProbe(said["library"], tuple(said["files"]))


def _ask(program: str, environ: Mapping[str, str], timeout_s: float) -> dict[str, Any] | str:
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
        said = json.loads(done.stdout.strip().splitlines()[-1])
        return said if isinstance(said, dict) else str(said)
    except (IndexError, ValueError):
        ending = f"it was ended by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return (done.stderr.strip().splitlines() or [ending])[-1]

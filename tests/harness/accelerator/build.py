"""Compilation of the simulated accelerator. Importing this does not make it known to torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("device.cpp")
BUILT = Path(__file__).parents[3] / "build" / "simulated"


def build() -> Path:
    """Return the compiled extension; compile it, in a minute, if it is missing."""
    key = hashlib.sha256(f"{torch.__version__}{SOURCE.read_text()}".encode()).hexdigest()[:12]
    module = BUILT / f"simulated_{key}{sysconfig.get_config_var('EXT_SUFFIX')}"
    BUILT.mkdir(parents=True, exist_ok=True)
    with open(BUILT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            partial = module.with_suffix(".partial")
            folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
            libraries = cpp_extension.library_paths()
            command = ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={name_of(module)}"]
            command += [f"-isystem{folder}" for folder in folders] + [str(SOURCE), "-o", str(partial)]
            command += [f"-L{folder}" for folder in libraries] + ["-lc10", "-ltorch_cpu", "-ltorch_python"]
            subprocess.run(command, check=True)
            os.replace(partial, module)
    return module


def name_of(module: Path) -> str:
    return module.name.split(".")[0]

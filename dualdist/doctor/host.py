"""Looks at this host; also run by ssh on others. Only the standard library is needed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dualdist.backends.shm.segment import FOLDER
from dualdist.doctor.facts import UNLIMITED, HostFacts
from dualdist.utils.network_interfaces import LOOPBACK, list_interfaces
from dualdist.utils.resource_limits import affinity_cores, quota_cores
from dualdist.version import __version__

PACKAGES = ("torch", "torchvision", "horovod", "mpi4py")
GPUS = Path("/proc/driver/nvidia/gpus")
INFINIBAND = Path("/sys/class/infiniband")
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDING = ("", "-1")  # its values that hide all


def look() -> HostFacts:
    """What this host is, and what it lets this process have."""
    name = socket.gethostname()
    began = time.monotonic()
    address = resolved(name)
    resolve_s = time.monotonic() - began
    return HostFacts(
        name=name,
        cores=affinity_cores(),
        all_cores=os.cpu_count() or 1,
        quota=quota_cores(),
        shm_free=_free(FOLDER),
        files=_limit(resource.RLIMIT_NOFILE),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=tuple(_names(INFINIBAND)),
        gpus=len(_names(GPUS)),
        interfaces=list_interfaces(),
        address=address,
        resolve_s=round(resolve_s, 3),
        reverse_s=round(_reverse_s(address), 3),
        versions=versions(),
        python=sys.executable,
    )


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """What is installed, without importing it; None for what is not."""
    found: dict[str, str | None] = {"dualdist": __version__, "python": platform.python_version()}
    return found | {name: _version(name) for name in packages}


def may_use_gpus(environ: Mapping[str, str]) -> bool:
    """Whether torch will find a GPU, as far as that can be told without importing it: a driver, and a build for it."""
    build = (_version("torch") or "").partition("+")[2]
    return bool(_names(GPUS)) and environ.get(VISIBLE) not in HIDING and build != "cpu"


def resolved(name: str) -> str:
    """An address of that name, "" where it has none."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return ""


def _reverse_s(address: str) -> float:
    """How long it takes to find the name of an address, as torch's store does of everybody who connects.

    It sees IPv4 addresses as IPv6 ones, which /etc/hosts does not have: name servers are asked.
    """
    began = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo((f"::ffff:{address or LOOPBACK}", 0), 0)
    return time.monotonic() - began


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    except importlib.metadata.PackageNotFoundError:
        return None


def _limit(kind: int) -> tuple[int, int]:
    soft, hard = (UNLIMITED if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(kind))
    return soft, hard


def _free(folder: str) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []

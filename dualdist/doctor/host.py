"""Facts about one host: name resolution, cores, limits, GPUs, interfaces and package versions.

Standard library only: `dualdist doctor --hosts` also runs this on other hosts, over ssh.
"""

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dualdist.backends.shm.segment import FOLDER
from dualdist.utils.machine import affinity_cores, quota_cores
from dualdist.utils.network_interfaces import LOOPBACK, list_interfaces
from dualdist.version import __version__

UNLIMITED = -1
PACKAGES = ("torch", "torchvision", "horovod", "mpi4py")
GPUS = Path("/proc/driver/nvidia/gpus")
INFINIBAND = Path("/sys/class/infiniband")
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDE_ALL = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that hide every GPU


@dataclass(frozen=True)
class HostFacts:
    """One host; limits are (soft, hard) pairs, UNLIMITED where there is none.

    `cores` are in this process's affinity mask, `cpu_quota` is the cgroup's, `shm_free` is in bytes (None without
    /dev/shm), `gpus` counts those of NVIDIA's driver, visible or not. `address` is that of the host's own name, "" if
    unresolved; `resolve_s` and `reverse_lookup_s` are the seconds of looking up the name and the address.
    """

    name: str
    cores: int = 1
    total_cores: int = 1
    cpu_quota: int | None = None
    shm_free: int | None = None
    open_files: tuple[int, int] = (UNLIMITED, UNLIMITED)
    locked_memory: tuple[int, int] = (UNLIMITED, UNLIMITED)
    infiniband: tuple[str, ...] = ()
    gpus: int = 0
    interfaces: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    resolve_s: float = 0.0
    reverse_lookup_s: float = 0.0
    versions: Mapping[str, str | None] = field(default_factory=dict)
    python: str = ""

    def external_interfaces(self) -> dict[str, str]:
        """Return the address of every interface but loopback."""
        return {name: address for name, address in self.interfaces.items() if not address.startswith("127.")}


def collect_host_facts() -> HostFacts:
    """Return the facts about this host and the limits of this process."""
    name = socket.gethostname()
    start = time.monotonic()
    address = resolve(name)
    resolve_s = time.monotonic() - start
    return HostFacts(
        name=name,
        cores=affinity_cores(),
        total_cores=os.cpu_count() or 1,
        cpu_quota=quota_cores(),
        shm_free=_free_bytes(FOLDER),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=tuple(_list(INFINIBAND)),
        gpus=len(_list(GPUS)),
        interfaces=list_interfaces(),
        address=address,
        resolve_s=round(resolve_s, 3),
        reverse_lookup_s=round(_time_reverse_lookup(address), 3),
        versions=installed_versions(),
        python=sys.executable,
    )


def installed_versions() -> dict[str, str | None]:
    """Return the installed versions without importing the packages; None for a missing one."""
    own: dict[str, str | None] = {"dualdist": __version__, "python": platform.python_version()}
    return own | {name: _version(name) for name in PACKAGES}


def may_use_gpus(environ: Mapping[str, str]) -> bool:
    """Return True if torch should find a GPU, judged without importing it: a driver, and not a CPU build."""
    build = (_version("torch") or "").partition("+")[2]
    return bool(_list(GPUS)) and environ.get(VISIBLE) not in HIDE_ALL and build != "cpu"


def resolve(name: str) -> str:
    """Return an IPv4 address of `name`, or ""."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return ""


def _time_reverse_lookup(address: str) -> float:
    """Return the seconds of the reverse lookup that torch's TCPStore does for every client.

    The store sees IPv4 clients as IPv6-mapped addresses, which /etc/hosts lacks, so name servers are queried.
    """
    start = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo((f"::ffff:{address or LOOPBACK}", 0), 0)
    return time.monotonic() - start


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    except importlib.metadata.PackageNotFoundError:
        return None


def _limit(kind: int) -> tuple[int, int]:
    soft, hard = (UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(kind))
    return soft, hard


def _free_bytes(folder: str) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _list(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []

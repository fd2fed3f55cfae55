"""How many cores and how much memory this process may use: in a container less than the machine has.

The formats are the kernel's (Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst). Limits of a group hold for those
inside it. A container may see its own group as the root of everything, and then only that one can be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# Version 1 says "no limit" by the largest multiple of a page, which no machine has.
NO_LIMIT = 1 << 60


def usable_cores() -> int:
    """The cores that this process may run on, and not more than `docker run --cpus` grants: 1.5 are one.

    More threads than that stop for most of every tenth of a second, all at once.
    """
    cores = affinity_cores()
    return min(cores, quota_cores() or cores)


def affinity_cores() -> int:
    """The cores that this process may run on, whatever time it may take on them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_cores() -> int:
    """All cores of this machine, or of this container; what a launcher binds a rank to makes no difference."""
    cores = os.cpu_count() or 1
    return min(cores, quota_cores() or cores)


def quota_cores() -> int | None:
    """The time on cores that this process may take, in whole cores and at least one; None where nobody limits it."""
    shares = []
    for folder in _folders("cpu"):
        quota, period = _v2_quota(folder) if (folder / "cpu.max").exists() else _v1_quota(folder)
        if quota > 0 and period > 0:
            shares.append(quota / period)
    return max(1, int(min(shares))) if shares else None


def memory_limit() -> int | None:
    """The bytes of memory above which this process would be killed; None where nobody limits it."""
    limits = []
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = _number(_words(folder / name, 1)[0])
            if 0 < value < NO_LIMIT:
                limits.append(value)
    return min(limits, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """The groups that this process is in, innermost first, as far as they can be seen."""
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = GROUPS
        elif controller in controllers.split(","):
            root = next((each for each in (GROUPS / controllers, GROUPS / controller) if each.is_dir()), GROUPS)
        else:
            continue
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir())


def _v2_quota(folder: Path) -> tuple[int, int]:
    quota, period = _words(folder / "cpu.max", 2)
    return _number(quota), _number(period)


def _v1_quota(folder: Path) -> tuple[int, int]:
    quota, period = (_words(folder / f"cpu.cfs_{name}_us", 1)[0] for name in ("quota", "period"))
    return _number(quota), _number(period)


def _words(path: Path, count: int) -> list[str]:
    """The first words of a file; empty ones where there are fewer."""
    return [*_read(path).split(), *[""] * count][:count]


def _number(word: str) -> int:
    """-1 where a file says that there is no limit ("max"), or nothing."""
    return int(word) if word.isdigit() else -1


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Room that operations and the gradients of a common model take in shared memory, for each rank of the host.
SHM_BYTES_PER_RANK = 48 << 20
# Gloo connects every pair of ranks on every line: torch's own, ours for operations and for gradients, and a group's.
LINES = 4
SPARE_FILES = 512


def needed_open_files(size: int) -> int:
    """How many files a rank of a job of so many may have open at once."""
    return LINES * size + SPARE_FILES

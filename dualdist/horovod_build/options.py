"""What the user asked install-horovod for, and how much a build takes."""

from __future__ import annotations

from dataclasses import dataclass

HOROVOD_VERSION = "0.28.1"
# Measured on Horovod 0.28.1: the unpacked sdist and its objects take 0.3 GB, a CUDA build several times that.
WORK_GB = 3.0
CACHE_GB = 0.2


@dataclass(frozen=True)
class Options:
    """The command line; `jobs` is None for as many as the machine carries."""

    version: str = HOROVOD_VERSION
    gpu: bool = False
    mpi: bool = True
    force: bool = False
    dry_run: bool = False
    jobs: int | None = None

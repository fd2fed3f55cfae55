"""Installed backends: which ones can be chosen here, and why not the others; nothing is imported or started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dualdist.horovod_build.record import BuildRecord

SINGLE, NATIVE, HOROVOD, MPI = "single", "native", "horovod", "mpi"
NO_TORCH = "torch is not installed"


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be chosen here, and why not; Horovod also says what it was built for and with."""

    available: bool
    version: str | None
    reason: str
    built_for_torch: str | None = None
    gloo: bool | None = None
    mpi: bool | None = None
    nccl: str | None = None


def available(versions: Mapping[str, str | None], record: BuildRecord | None) -> dict[str, Availability]:
    """Every backend, from the installed versions and what the installed Horovod was built for."""
    torch = versions["torch"]
    plain = Availability(torch is not None, torch, "" if torch else NO_TORCH)
    return {SINGLE: plain, NATIVE: plain, HOROVOD: _horovod(torch, record), MPI: _mpi(torch, versions["mpi4py"])}


def _mpi(torch: str | None, mpi4py: str | None) -> Availability:
    """Which MPI it would find is not known before that starts, which may end this process."""
    if torch is None:
        return Availability(False, mpi4py, NO_TORCH)
    return Availability(mpi4py is not None, mpi4py, "" if mpi4py else "mpi4py is not installed")


def _horovod(torch: str | None, record: BuildRecord | None) -> Availability:
    if record is None:
        return Availability(False, None, "Horovod is not installed")
    reason = ""
    if torch is None:
        reason = NO_TORCH
    elif not record.fits(torch):
        reason = f"built for torch {record.torch}, but torch {torch} is installed"
    return Availability(
        not reason, record.horovod, reason, record.torch, gloo=record.gloo, mpi=record.mpi, nccl=record.nccl
    )

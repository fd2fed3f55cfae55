"""What findings are functions of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dualdist.doctor.facts import InstallationFacts
from dualdist.environments.env_values import text
from dualdist.horovod_build.record import BuildRecord
from dualdist.rendezvous.backend_selection import BACKEND, TRANSPORT
from dualdist.topology import Topology

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


@dataclass(frozen=True)
class DoctorContext:
    """A process, its host and its job. `topology` is None where the variables are broken.

    `ranks` of the job are on this host; `is_asked` says that somebody has named their number, who means to start them.
    """

    facts: InstallationFacts
    environ: Mapping[str, str]
    topology: Topology | None
    backends: Mapping[str, Availability]
    ranks: int
    is_asked: bool

    @property
    def asked(self) -> str | None:
        """The backend that was asked for."""
        return text(self.environ, BACKEND)

    @property
    def launcher(self) -> str:
        return "none" if self.topology is None else self.topology.launcher

    @property
    def is_started(self) -> bool:
        """Whether a launcher has started this process as one of several."""
        return self.topology is not None and self.topology.size > 1

    @property
    def is_spread(self) -> bool:
        """Whether the job is on several hosts for all that is known."""
        return self.topology is not None and self.topology.num_nodes > 1

    @property
    def wants_mpi(self) -> bool:
        return "mpi" in (self.asked, text(self.environ, TRANSPORT))

    @property
    def wants_horovod(self) -> bool:
        """Whether this job runs on Horovod, or not at all."""
        return self.asked == "horovod" or (self.asked in (None, "auto") and self.launcher == "horovodrun")

    def pip(self, *words: str) -> tuple[str, ...]:
        """The command line that has pip do this in this Python."""
        return (self.facts.python, "-m", "pip", *words)

    def ours(self, *words: str) -> tuple[str, ...]:
        """The command line of one of our commands, by this Python."""
        return (self.facts.python, "-m", "dualdist", *words)

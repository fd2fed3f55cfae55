"""What this process would be in its job, and what would not work: from the variables and the installed files alone.

Nothing is started, and neither torch, Horovod nor mpi4py is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from dualdist.environments import detect, slurm
from dualdist.environments.variables import INTEGER, text
from dualdist.errors import TopologyError
from dualdist.horovod_build.record import BuildRecord, read_record
from dualdist.topology import Topology
from dualdist.version import __version__

BACKEND = "DUALDIST_BACKEND"
RENDEZVOUS = "DUALDIST_RENDEZVOUS"
SLURM_JOB = "SLURM_JOB_ID"
SLURM_TASKS = "SLURM_NTASKS"
INSTALL = "dualdist install-horovod"
PACKAGES = ("torch", "horovod", "mpi4py")
SINGLE, NATIVE, HOROVOD, MPI = "single", "native", "horovod", "mpi"
EXIT_CODES = {"info": 0, "warning": 1, "error": 2}

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One thing to know: what was seen, why it matters, what to type. An error will stop the job, a warning may."""

    level: Level
    seen: str
    why: str
    do: str


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


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `dualdist doctor` shows; no topology where the variables are broken."""

    topology: Topology | None
    backends: Mapping[str, Availability]
    findings: tuple[Finding, ...]
    versions: Mapping[str, str | None]

    @property
    def exit_code(self) -> int:
        """0 where nothing is wrong, 1 where something may fail, 2 where something will."""
        return max((EXIT_CODES[finding.level] for finding in self.findings), default=0)


def diagnose(environ: Mapping[str, str]) -> Diagnosis:
    """The state of this process and its installation; besides `environ` it reads what pip has installed."""
    found: Topology | TopologyError
    try:
        found = detect(environ)
    except TopologyError as error:
        found = error
    versions: dict[str, str | None] = {"dualdist": __version__, "python": platform.python_version()}
    versions.update({name: _version(name) for name in PACKAGES})
    return judge(found, environ, versions, read_record())


def judge(
    found: Topology | TopologyError,
    environ: Mapping[str, str],
    versions: Mapping[str, str | None],
    record: BuildRecord | None,
) -> Diagnosis:
    """The diagnosis for a place or its error, the installed versions and the build of the installed Horovod."""
    backends = _backends(versions, record)
    topology = found if isinstance(found, Topology) else None
    findings = [*_of_backends(backends, environ)]
    if topology is None:
        why = "dd.init() raises this on every rank that sees these variables"
        findings.insert(0, Finding("error", str(found), why, "type what the sentence says"))
    else:
        findings += [
            *_of_slurm(topology, environ),
            *_of_meeting(topology, environ, versions, backends),
            *_of_mpi(topology, environ, backends[MPI]),
        ]
    return Diagnosis(topology, backends, tuple(findings), versions)


def to_json(diagnosis: Diagnosis) -> dict[str, object]:
    """The diagnosis as JSON has it; `inferred` in alphabetical order."""
    topology = diagnosis.topology
    return {
        "topology": None if topology is None else {**asdict(topology), "inferred": sorted(topology.inferred)},
        "backends": {name: asdict(backend) for name, backend in diagnosis.backends.items()},
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "versions": dict(diagnosis.versions),
    }


def _version(package: str) -> str | None:
    """The installed version; None where the package is not installed."""
    try:
        return importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends(versions: Mapping[str, str | None], record: BuildRecord | None) -> dict[str, Availability]:
    torch = versions["torch"]
    missing = "torch is not installed"
    plain = Availability(torch is not None, torch, "" if torch else missing)
    return {SINGLE: plain, NATIVE: plain, HOROVOD: _horovod(torch, record), MPI: _mpi(torch, versions["mpi4py"])}


def _mpi(torch: str | None, mpi4py: str | None) -> Availability:
    """Which MPI it would find is not known before that starts, which may end this process."""
    if torch is None:
        return Availability(False, mpi4py, "torch is not installed")
    return Availability(mpi4py is not None, mpi4py, "" if mpi4py else "mpi4py is not installed")


def _horovod(torch: str | None, record: BuildRecord | None) -> Availability:
    if record is None:
        return Availability(False, None, "Horovod is not installed")
    reason = ""
    if torch is None:
        reason = "torch is not installed"
    elif not record.fits(torch):
        reason = f"built for torch {record.torch}, but torch {torch} is installed"
    return Availability(
        not reason, record.horovod, reason, record.torch, gloo=record.gloo, mpi=record.mpi, nccl=record.nccl
    )


def _of_backends(backends: Mapping[str, Availability], environ: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the installation."""
    native, horovod = backends[NATIVE], backends[HOROVOD]
    asked = text(environ, BACKEND)
    if not native.available:
        yield Finding("error", native.reason, "every backend needs it", "pip install torch")
    elif horovod.version is not None and not horovod.available:
        why = "its compiled part does not load beside another torch"
        yield Finding("warning", f"Horovod is {horovod.reason}", why, f"{INSTALL} --force")
    elif not horovod.available and asked != HOROVOD:
        yield Finding("info", horovod.reason, "only the native backend can be used", INSTALL)
    if asked == HOROVOD and not horovod.available:
        why = f"{BACKEND}={HOROVOD} asks for it"
        yield Finding("error", horovod.reason, why, f"{INSTALL}, or unset {BACKEND}")


def _of_slurm(topology: Topology, environ: Mapping[str, str]) -> Iterator[Finding]:
    """A job of one within an allocation of several tasks: right for a batch script, wrong if srun was forgotten."""
    if topology.launcher != "none" or text(environ, SLURM_JOB) is None:
        return
    value = text(environ, SLURM_TASKS) or ""
    tasks = int(value) if INTEGER.fullmatch(value) else 1
    if tasks > 1:
        yield Finding(
            "info",
            f"{SLURM_TASKS}={tasks}, but this process is no task of a Slurm step",
            "a batch script or a shell of salloc runs once, as a job of one rank",
            f"to start {tasks} ranks, put srun before it: {slurm.NAMES.command.replace('-n N', f'-n {tasks}')}",
        )


def _of_meeting(
    topology: Topology,
    environ: Mapping[str, str],
    versions: Mapping[str, str | None],
    backends: Mapping[str, Availability],
) -> Iterator[Finding]:
    """Ranks that only MPI can bring together, without anything that speaks MPI."""
    by_mpi = topology.meeting == "mpi" and text(environ, RENDEZVOUS) is None
    horovod = backends[HOROVOD]
    if by_mpi and versions["mpi4py"] is None and not (horovod.available and horovod.mpi is not False):
        yield Finding(
            "error",
            f"mpi4py is not installed, and {topology.launcher} gives no address of rank 0",
            "the ranks find each other through MPI",
            f"pip install mpi4py, or set MASTER_ADDR and MASTER_PORT, or {RENDEZVOUS}=file:///a/shared/folder/name",
        )


def _of_mpi(topology: Topology, environ: Mapping[str, str], mpi: Availability) -> Iterator[Finding]:
    """A backend that was asked for where it cannot be had."""
    if text(environ, BACKEND) != MPI or topology.size == 1:
        return
    why = f"{BACKEND}={MPI} asks for it"
    if not topology.mpi:
        seen = f"MPI was not started by {topology.launcher}"
        do = f"start with mpirun, mpiexec, horovodrun --mpi or srun --mpi=pmix, or unset {BACKEND}"
        yield Finding("error", seen, why, do)
    elif not mpi.available:
        yield Finding("error", mpi.reason, why, f"pip install mpi4py, or unset {BACKEND}")

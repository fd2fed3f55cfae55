"""All findings about a process, its installation, its host and its job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dualdist.backends.availability import Availability, available
from dualdist.doctor import collect, host
from dualdist.doctor.checks import choices, horovod, mpi, network, slurm, torch
from dualdist.doctor.checks import gpus as of_gpus
from dualdist.doctor.checks import host as of_host
from dualdist.doctor.context import DoctorContext
from dualdist.doctor.facts import InstallationFacts
from dualdist.doctor.findings import Finding, by_weight, exit_code
from dualdist.environments import detect
from dualdist.errors import TopologyError
from dualdist.horovod_build.record import read_record
from dualdist.topology import Topology
from dualdist.utils.package_probe import TorchProbe

FAMILIES = (choices, torch, horovod, mpi, slurm, of_gpus, of_host, network)
# Where nobody has said how many ranks there shall be.
LEAST_RANKS = 2


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `dualdist doctor` shows; no topology where the variables are broken."""

    topology: Topology | None
    backends: Mapping[str, Availability]
    findings: tuple[Finding, ...]
    versions: Mapping[str, str | None]
    gpus: int = 0  # that torch sees

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)

    def with_more(self, findings: Sequence[Finding]) -> Diagnosis:
        """The same, with what else was found."""
        return replace(self, findings=by_weight([*self.findings, *findings]))


def installed_backends() -> dict[str, Availability]:
    """Which backends can be chosen here, from what pip has installed; quick."""
    return available(host.versions(), read_record())


def place(environ: Mapping[str, str]) -> Topology | TopologyError:
    """This process's place in its job, or why it has none."""
    try:
        return detect(environ)
    except TopologyError as error:
        return error


def diagnose(environ: Mapping[str, str], ranks: int | None = None) -> Diagnosis:
    """What is wrong here for this process, or for so many ranks that somebody means to start on this host."""
    found = place(environ)
    topology = found if isinstance(found, Topology) else None
    return judge(found, environ, collect.look(environ, topology), ranks)


def judge(
    found: Topology | TopologyError, environ: Mapping[str, str], facts: InstallationFacts, ranks: int | None = None
) -> Diagnosis:
    """The diagnosis for a place or its error, and the facts."""
    topology = found if isinstance(found, Topology) else None
    backends = available(facts.versions, facts.horovod)
    on_host = LEAST_RANKS if topology is None or topology.size == 1 else topology.local_size
    case = DoctorContext(facts, environ, topology, backends, ranks or on_host, is_asked=ranks is not None)
    findings = [finding for family in FAMILIES for finding in family.find(case)]
    if isinstance(found, TopologyError):
        why = "dd.init() raises this on every rank that sees these variables"
        findings.insert(0, Finding("place-unknown", "error", str(found), why, "type what the sentence says"))
    gpus = facts.torch.gpus if isinstance(facts.torch, TorchProbe) else 0
    return Diagnosis(topology, backends, by_weight(findings), facts.versions, gpus)


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON has it; `inferred` in alphabetical order."""
    topology = diagnosis.topology
    return {
        "topology": None if topology is None else place_json(topology),
        "backends": {name: asdict(backend) for name, backend in diagnosis.backends.items()},
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "versions": dict(diagnosis.versions),
        "exit_code": diagnosis.exit_code,
    }


def place_json(topology: Topology) -> dict[str, Any]:
    return {**asdict(topology), "inferred": sorted(topology.inferred)}

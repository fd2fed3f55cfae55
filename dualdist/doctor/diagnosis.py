"""All findings about a process, its installation, its host and its job, in one record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dualdist.backends.registry import Availability, availability
from dualdist.doctor.checks import EXIT_CODES, DoctorContext, Finding, error, horovod, host, launch, mpi, network, torch
from dualdist.doctor.facts import InstallationFacts, collect_facts, installed_versions
from dualdist.environments import detect
from dualdist.errors import TopologyError
from dualdist.horovod_build.record import read_record
from dualdist.topology import Topology

CHECKS = (launch, torch, horovod, mpi, host, network)
DEFAULT_RANKS = 2  # planned ranks without -np


@dataclass(frozen=True)
class Diagnosis:
    """The result of `dualdist doctor`; `topology` is None where the launcher's variables are invalid."""

    topology: Topology | None
    backends: Mapping[str, Availability]
    findings: tuple[Finding, ...]
    versions: Mapping[str, str | None]
    visible_gpus: int = 0

    @property
    def exit_code(self) -> int:
        """0 without problems, 1 if something may fail, 2 if something will."""
        return max((EXIT_CODES[finding.level] for finding in self.findings), default=0)

    def with_findings(self, findings: Iterable[Finding]) -> Diagnosis:
        """Return a copy with more findings, the worst first."""
        found = sorted([*self.findings, *findings], key=lambda finding: -EXIT_CODES[finding.level])
        return replace(self, findings=tuple(found))


def installed_backends() -> dict[str, Availability]:
    """Return the availability of every backend, from the installed packages; fast."""
    return availability(installed_versions(), read_record())


def detect_topology(environ: Mapping[str, str]) -> Topology | TopologyError:
    """Return the topology, or the error that dd.init() would raise."""
    try:
        return detect(environ)
    except TopologyError as error:
        return error


def diagnose(environ: Mapping[str, str], ranks: int | None = None) -> Diagnosis:
    """Check this process, or `ranks` processes that the user plans to start on this host."""
    detected = detect_topology(environ)
    topology = detected if isinstance(detected, Topology) else None
    return evaluate(detected, environ, collect_facts(environ, topology), ranks)


def evaluate(
    detected: Topology | TopologyError, environ: Mapping[str, str], facts: InstallationFacts, ranks: int | None = None
) -> Diagnosis:
    topology = detected if isinstance(detected, Topology) else None
    backends = availability(facts.versions, facts.horovod)
    local_ranks = DEFAULT_RANKS if topology is None or topology.size == 1 else topology.local_size
    context = DoctorContext(facts, environ, topology, backends, ranks or local_ranks, is_planned=ranks is not None)
    findings = [finding for check in CHECKS for finding in check.find(context)]
    if isinstance(detected, TopologyError):
        why = "dd.init() raises this error on every rank with these variables"
        findings.insert(0, error("topology-unknown", str(detected), why, "set the variables as it says"))
    return Diagnosis(topology, backends, (), facts.versions, context.visible_gpus).with_findings(findings)


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    topology = diagnosis.topology
    return {
        "topology": None if topology is None else topology_to_json(topology),
        "backends": {name: asdict(backend) for name, backend in diagnosis.backends.items()},
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "versions": dict(diagnosis.versions),
        "exit_code": diagnosis.exit_code,
    }


def topology_to_json(topology: Topology) -> dict[str, Any]:
    return {**asdict(topology), "inferred": sorted(topology.inferred)}

"""What `dualdist doctor` says to a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dualdist.cli.colour import Paint
from dualdist.doctor import Availability, Diagnosis
from dualdist.doctor.explain import Explanation
from dualdist.doctor.findings import Level
from dualdist.topology import Topology

STYLES: dict[Level, tuple[str, ...]] = {"error": ("red", "bold"), "warning": ("yellow", "bold"), "info": ("blue",)}
VERDICTS = {0: "nothing is wrong here", 1: "something may fail", 2: "something will fail"}


def lines(diagnosis: Diagnosis, paint: Paint) -> Iterator[str]:
    """Where this process is and what it can use, in three lines; the findings, the worst first; what they amount to."""
    topology = diagnosis.topology
    yield f"{'place':<10}{'unknown: the variables are broken, see below' if topology is None else _place(topology)}"
    usable = [f"{name}{_built(backend)}" for name, backend in diagnosis.backends.items() if backend.available]
    lacking = [f"{name}: {backend.reason}" for name, backend in diagnosis.backends.items() if not backend.available]
    yield f"{'backends':<10}{', '.join(usable) or 'none'}{''.join(f'; not {each}' for each in lacking)}"
    versions = ", ".join(f"{name} {version or 'none'}" for name, version in diagnosis.versions.items())
    yield f"{'versions':<10}{versions}"
    for finding in diagnosis.findings:
        yield ""
        yield f"{paint(finding.level, *STYLES[finding.level])}: {finding.seen}  {paint(f'[{finding.name}]', 'dim')}"
        yield f"  why: {finding.why}"
        yield f"  do:  {finding.do}"
    counts = Counter(finding.level for finding in diagnosis.findings)
    told = ", ".join(f"{counts[level]} {level}{'s' if counts[level] > 1 else ''}" for level in STYLES if counts[level])
    yield ""
    yield f"{VERDICTS[diagnosis.exit_code]}{f' ({told})' if told else ''}"


def tried_lines(cells: Mapping[str, Any] | None, paint: Paint) -> Iterator[str]:
    """Which cells were started, and which were not."""
    if cells is None:
        return
    failed = sum(bool(each["problem"]) for each in cells["tried"])
    yield f"{len(cells['tried'])} ways to run were tried, {failed} failed"
    for each in cells["tried"]:
        state = paint("FAILED", "red", "bold") if each["problem"] else paint("works", "green")
        yield f"  {state:<6}  {each['launcher']}, {each['backend']} over {each['transport']}, {each['seconds']:.1f} s"
    reasons = Counter(each["reason"] for each in cells["left_out"])
    if reasons:
        yield f"{len(cells['left_out'])} were left out:"
        yield from (f"  {count:>2} as {reason}" for reason, count in reasons.most_common())


def explained(explanation: Explanation, paint: Paint) -> Iterator[str]:
    """Every part of the place with its source, and what did not count."""
    if explanation.error:
        yield f"{paint('error', *STYLES['error'])}: {explanation.error}"
    width = max((len(part.value) for part in explanation.parts), default=0)
    for part in explanation.parts:
        yield f"{part.name.replace('_', ' '):<12}{part.value:<{width}}  {paint(part.source, 'dim')}"
    if explanation.ignored:
        yield "ignored:" if explanation.parts else "set, too:"
        yield from (f"  {each.name}={each.value}  {paint(each.why, 'dim')}" for each in explanation.ignored)


def _place(topology: Topology) -> str:
    def told(name: str) -> str:
        return f"{getattr(topology, name)}{' (inferred)' if name in topology.inferred else ''}"

    if topology.launcher == "none":
        return "no launcher started this process: a job of one rank"
    return (
        f"rank {topology.rank} of {topology.size}, local rank {told('local_rank')} of {told('local_size')}, "
        f"node {told('node')} of {told('nodes')}, by {topology.launcher} ({topology.source})"
    )


def _built(backend: Availability) -> str:
    built = [word for word, has in (("gloo", backend.gloo), ("mpi", backend.mpi), ("nccl", backend.nccl)) if has]
    return f" (built with {', '.join(built)})" if built else ""

"""`dualdist doctor`: print findings, explain the topology, run smoke tests, probe hosts."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.backends.registry import Availability
from dualdist.bench.jobs import (
    MachineFacts,
    MeasurementSettings,
    RunConfig,
    expand_configs,
    refusal_reasons,
    split_words,
)
from dualdist.cli.help_formatter import set_completions
from dualdist.doctor import hosts, smoke_test
from dualdist.doctor.checks import Level
from dualdist.doctor.checks import hosts as host_checks
from dualdist.doctor.diagnosis import (
    DEFAULT_RANKS,
    Diagnosis,
    detect_topology,
    diagnose,
    installed_backends,
    to_json,
    topology_to_json,
)
from dualdist.doctor.explain import TopologyExplanation, explain
from dualdist.doctor.facts import may_use_gpus
from dualdist.errors import UsageError
from dualdist.launch.env_defaults import SLURM_JOB, rank_variables
from dualdist.launch.execute import find_site
from dualdist.launch.hosts import parse_hosts, read_hostfile
from dualdist.launch.launchers import MULTI_RANK_LAUNCHERS
from dualdist.launch.processes import termination_raises
from dualdist.topology import Topology
from dualdist.utils.output_file import check_writable, write_json
from dualdist.utils.redaction import make_redactor, redact_json

LEVELS: tuple[Level, ...] = ("error", "warning", "info")
VERDICTS = {0: "no problems found", 1: "something may fail", 2: "something will fail"}
# Of an error, as 1 means warnings.
ERROR_CODE = 2
EXAMPLES = (
    "dualdist doctor",
    "dualdist doctor --run -np 2",
    "dualdist doctor --hosts a:4,b:4 --json report.json",
    "srun -n 4 dualdist doctor --explain-env",
)
COMMON = dict.fromkeys(("explain_env", "ranks", "run", "hosts", "json"), "")


def format_diagnosis(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the topology, the backends and the versions, then the findings, worst first, and the verdict."""
    location = _topology(diagnosis.topology) if diagnosis.topology else "unknown: the variables are invalid, see below"
    yield f"{'topology':<10}{location}"
    usable = [f"{name}{_build(backend)}" for name, backend in diagnosis.backends.items() if backend.available]
    missing = [f"not {name}: {backend.reason}" for name, backend in diagnosis.backends.items() if backend.reason]
    yield f"{'backends':<10}{'; '.join([', '.join(usable) or 'none', *missing])}"
    versions = (f"{name} {version or 'none'}" for name, version in diagnosis.versions.items())
    yield f"{'versions':<10}{', '.join(versions)}"
    for finding in diagnosis.findings:
        yield ""
        yield f"{finding.level}: {finding.message}  [{finding.name}]"
        yield f"  why: {finding.why}"
        yield f"  fix: {finding.fix}"
    counts = Counter(finding.level for finding in diagnosis.findings)
    summary = ", ".join(f"{counts[level]} {level}{'s' * (counts[level] > 1)}" for level in LEVELS if counts[level])
    yield ""
    yield f"{VERDICTS[diagnosis.exit_code]}{f' ({summary})' if summary else ''}"


def format_smoke_tests(cells: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the configurations that were tested and those that were skipped."""
    if cells is None:
        return
    failed = sum(bool(each["problem"]) for each in cells["tested"])
    yield f"{len(cells['tested'])} configurations tested, {failed} failed"
    for each in cells["tested"]:
        state = "FAILED" if each["problem"] else "works"
        yield f"  {state:<6}  {each['launcher']}, {each['backend']} over {each['transport']}, {each['seconds']:.1f} s"
    reasons = Counter(each["reason"] for each in cells["skipped"])
    if reasons:
        yield f"{len(cells['skipped'])} skipped:"
        yield from (f"  {count:>2}: {reason}" for reason, count in reasons.most_common())


def format_explanation(explanation: TopologyExplanation) -> Iterator[str]:
    """Yield every topology field with its source, and the ignored variables with reasons."""
    if explanation.error:
        yield f"error: {explanation.error}"
    width = max((len(each.value) for each in explanation.fields), default=0)
    for each in explanation.fields:
        yield f"{each.name.replace('_', ' '):<12}{each.value:<{width}}  {each.source}"
    if explanation.ignored:
        yield "ignored:" if explanation.fields else "also set:"
        yield from (f"  {each.name}={each.value}  {each.why}" for each in explanation.ignored)
    if explanation.exec_sets:
        given = " ".join(f"{name}={value}" for name, value in explanation.exec_sets.items())
        yield f"dualdist exec sets {given}, MASTER_ADDR and MASTER_PORT"


def _topology(topology: Topology) -> str:
    def value(name: str) -> str:
        return f"{getattr(topology, name)}{' (inferred)' if name in topology.inferred else ''}"

    if topology.launcher == "none":
        return "no launcher started this process: a 1-rank job"
    return (
        f"rank {topology.rank} of {topology.size}, local rank {value('local_rank')} of {value('local_size')}, "
        f"node {value('node_rank')} of {value('num_nodes')}, started by {topology.launcher} ({topology.source})"
    )


def _build(backend: Availability) -> str:
    built = [word for word, has in (("gloo", backend.gloo), ("mpi", backend.mpi), ("nccl", backend.nccl)) if has]
    return f" (built with {', '.join(built)})" if built else ""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--explain-env", action="store_true", help="show the variable behind each topology field")
    add("-np", "--ranks", type=int, metavar="N", help="check whether N ranks fit here (default: 2)")
    add("--run", action="store_true", help="run one collective on every usable configuration")
    add("--launchers", metavar="A,B", help="launchers to test with --run")
    add("--backends", metavar="A,B", help="backends to test with --run")
    add("--hosts", metavar="A:2,B:2", help="probe these hosts over ssh and their connections")
    add("--hostfile", metavar="FILE", help="like --hosts, from a file as for dualdist run")
    add("--json", nargs="?", const="-", metavar="FILE", help="also write JSON to FILE; alone: only JSON, on stdout")
    set_completions(parser, {"launchers": MULTI_RANK_LAUNCHERS, "backends": registry.names()})
    parser.epilog = "Exit code: 0 without problems, 1 if something may fail, 2 if something will."


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis and return its exit code."""
    _check(args)
    redact = make_redactor(os.environ)
    if args.explain_env:
        return _explain(args, redact)
    diagnosis = diagnose(os.environ, args.ranks)
    more: dict[str, Any] = {}
    if args.hosts is not None or args.hostfile is not None:
        diagnosis, more["hosts"] = _probe_hosts(args, diagnosis)
    if args.run:
        diagnosis, more["cells"] = _run_smoke_tests(args, diagnosis)
    write_json(args.json, json.dumps(redact_json({**to_json(diagnosis), **more}, redact), indent=1))
    if args.json != "-":
        _print([*format_diagnosis(diagnosis), *format_smoke_tests(more.get("cells"))], redact)
    return diagnosis.exit_code


def _check(args: argparse.Namespace) -> None:
    if args.ranks is not None and args.ranks < 1:
        raise UsageError(f"-np {args.ranks}: expected 1 or more")
    for name in ("launchers", "backends"):
        if getattr(args, name) and not args.run:
            raise UsageError(f"--{name} requires --run")
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("--hosts and --hostfile both name hosts: give one of them")
    check_writable("--json", args.json)
    if args.run:  # checked before the diagnosis, which takes seconds
        topology = detect_topology(os.environ)
        if not isinstance(topology, Topology) or topology.launcher != "none":
            raise UsageError("--run starts ranks itself: run it in a process that no launcher has started")
        _configs(args)


def _configs(args: argparse.Namespace) -> list[RunConfig]:
    """Return the configurations that --run tests; raise UsageError for unknown names."""
    launchers, backends = split_words(args.launchers) or MULTI_RANK_LAUNCHERS, split_words(args.backends)
    return expand_configs(launchers, backends or registry.names(), (), os.environ)


def _explain(args: argparse.Namespace, redact: Callable[[str], str]) -> int:
    detected = detect_topology(os.environ)
    explanation = explain(os.environ, detected, installed_backends(), has_gpu=may_use_gpus(os.environ))
    topology = topology_to_json(detected) if isinstance(detected, Topology) else None
    write_json(args.json, json.dumps(redact_json({"topology": topology, **asdict(explanation)}, redact), indent=1))
    if args.json != "-":
        _print(format_explanation(explanation), redact)
    return ERROR_CODE if explanation.error else 0


def _probe_hosts(args: argparse.Namespace, diagnosis: Diagnosis) -> tuple[Diagnosis, list[Any]]:
    named = parse_hosts(args.hosts) if args.hosts is not None else read_hostfile(Path(args.hostfile))
    forwarded = rank_variables(os.environ, {}, threads=None, interface=None, has_hosts=True)
    reports = hosts.probe_hosts(named, find_site(), forwarded)
    return diagnosis.with_findings(host_checks.find(reports)), [_report_to_json(report) for report in reports]


def _report_to_json(report: Any) -> dict[str, Any]:
    connections = {name: [[*target, error] for target, error in to.items()] for name, to in report.connections.items()}
    return {**asdict(report), "connections": connections}


def _run_smoke_tests(args: argparse.Namespace, diagnosis: Diagnosis) -> tuple[Diagnosis, dict[str, Any]]:
    site, ranks = find_site(), args.ranks or DEFAULT_RANKS
    facts = MachineFacts(diagnosis.visible_gpus, diagnosis.backends, is_in_slurm=SLURM_JOB in os.environ)
    configs = _configs(args)
    refused = refusal_reasons(configs, MeasurementSettings(ranks, site), facts)
    usable = [config for config in configs if config not in refused]
    with termination_raises():
        results = smoke_test.run_cells(usable, ranks, site, _log)
    report = {
        "tested": [asdict(result) for result in results],
        "skipped": [{**asdict(config), "reason": reason} for config, reason in refused.items()],
    }
    return diagnosis.with_findings(smoke_test.find(results)), report


def _log(line: str) -> None:
    print(make_redactor(os.environ)(line), file=sys.stderr, flush=True)


def _print(lines: Iterable[str], redact: Callable[[str], str]) -> None:
    sys.stdout.write("".join(f"{redact(line)}\n" for line in lines))
    sys.stdout.flush()

"""`dualdist bench startup`: time and memory from import to the first collective, in new processes."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from dualdist.backends import registry
from dualdist.bench.jobs import FOREIGN, Done, MeasurementSettings, PlannedJob, RunConfig, program_command
from dualdist.bench.ranks import cold_start
from dualdist.bench.report import ReportTable
from dualdist.bench.statistics import bootstrap_median, machine_noise, time_difference, time_ratio

KINDS = ("raw", "dualdist")
RESOURCES = ("peak_bytes", "private_bytes", "sockets")  # what a rank uses after its second allreduce
PHASES = ("torch", "import", "init", "first", "second")
# dualdist imports a backend's library in init: only these sums of phases are comparable between the libraries.
TOTAL = "total to first collective"
SUMS = {"import and init": ("import", "init"), TOTAL: ("torch", "import", "init", "first")}
PHASES_NOTE = (
    "torch: import torch; import: import of the library without torch (dualdist is imported before torch and imports "
    "its backend's library in init); init starts when all ranks have imported; first, second: allreduces of 8 bytes; "
    "times are the slowest rank's"
)
RESOURCES_NOTE = (
    "times as above, all ranks on one machine; peak: maximum resident memory; private: memory not shared with other "
    "processes after the second allreduce; of the rank that uses most, median over rounds"
)


def with_raw_launchers(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """Return the configurations with the launcher that the raw library needs to find its ranks."""
    found = []
    for each in configs:
        needs_mpi = registry.needs_mpi(each.backend, each.transport)
        found.append(replace(each, launcher="mpirun" if needs_mpi else registry.get(each.backend).launcher))
    return found


def plan_jobs(
    configs: Sequence[RunConfig], settings: Sequence[MeasurementSettings], folder: Path, *, rounds: int
) -> Iterator[PlannedJob]:
    """Yield two jobs per round, configuration and settings (number of ranks), whose order alternates by round."""
    for number in range(rounds):
        for config, each in itertools.product(configs, settings):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                own = folder / f"startup-{config.backend}-{config.transport or 'own'}-{each.ranks}-{kind}-{number}"
                library = registry.get(config.backend).library if kind == "raw" else "dualdist"
                program = (cold_start.__file__, library, str(each.ranks), str(own), each.device)
                reports = tuple(own / f"{rank}.json" for rank in range(each.ranks))
                title = f"round {number + 1}, start-up of {library}, {each.ranks} ranks, {config}"
                tags = {"config": config, "kind": kind, "ranks": each.ranks, "launch": number}
                yield PlannedJob(title, program_command(config, program, each), reports, tags)


def summarize(done: Done) -> list[dict[str, Any]]:
    """Return one result per configuration and number of ranks, from the rounds that both libraries completed."""
    rounds: dict[tuple[RunConfig, int, int], dict[str, list[dict[str, Any]]]] = {}
    for planned, reports in done:
        tags = planned.tags
        rounds.setdefault((tags["config"], tags["ranks"], tags["launch"]), {})[tags["kind"]] = reports
    groups: dict[tuple[RunConfig, int], list[dict[str, list[dict[str, Any]]]]] = {}
    for (config, ranks, _), found in rounds.items():
        if len(found) == len(KINDS):
            groups.setdefault((config, ranks), []).append(found)
    return [
        _result(config, {kind: [found[kind] for found in group] for kind in KINDS})
        for (config, _), group in groups.items()
    ]


def _result(config: RunConfig, kinds: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    parts = {name: (name,) for name in PHASES} | SUMS
    seconds = {
        kind: {part: [_slowest(reports, phases) for reports in jobs] for part, phases in parts.items()}
        for kind, jobs in kinds.items()
    }
    foreign = [
        max((value for value in pair if value is not None), default=None)
        for pair in zip(*([job[0][FOREIGN] for job in jobs] for jobs in kinds.values()), strict=True)
    ]
    return {
        **asdict(config),
        "library": registry.get(config.backend).library,
        "ranks": len(kinds["raw"][0]),
        "rounds": len(kinds["raw"]),
        "resources": {kind: {name: _max_of_ranks(jobs, name) for name in RESOURCES} for kind, jobs in kinds.items()},
        "noise": machine_noise([foreign], [seconds["raw"][TOTAL]]),
        "parts": {
            part: {
                **{kind: bootstrap_median([seconds[kind][part]]) for kind in KINDS},
                **{f"min_{kind}": min(seconds[kind][part]) for kind in KINDS},
                "overhead_s": time_difference([seconds["dualdist"][part]], [seconds["raw"][part]]),
                "ratio_to_raw": time_ratio([seconds["dualdist"][part]], [seconds["raw"][part]], [foreign]),
            }
            for part in parts
        },
    }


def _slowest(reports: list[dict[str, Any]], phases: Sequence[str]) -> float:
    return max(float(sum(report["seconds"][phase] for phase in phases)) for report in reports)


def _max_of_ranks(jobs: list[list[dict[str, Any]]], name: str) -> float | None:
    """Return the maximum over the ranks, the median over jobs; None if unknown."""
    found = [max(report[name] for report in job) for job in jobs if all(report[name] is not None for report in job)]
    return median(found) if found else None


def tables(results: Sequence[dict[str, Any]]) -> Iterator[ReportTable]:
    """Yield one table per result, and one per configuration that shows how costs grow with the number of ranks."""
    for result in results:
        library = result["library"]
        yield ReportTable(
            f"start-up of {_name(result)}, {result['ranks']} ranks, {result['rounds']} "
            "rounds of new processes, warm disk cache",
            ("phase", f"{library} ms", "dualdist ms", f"{library} min", "dualdist min", "overhead ms", "95%"),
            tuple(_part_row(name, part) for name, part in result["parts"].items()),
            (PHASES_NOTE, f"machine: {result['noise']['summary']}"),
        )
    for name in dict.fromkeys(map(_name, results)):
        units = ("init ms", "total ms", "peak MiB", "private MiB", "sockets")
        yield ReportTable(
            f"costs of a rank by number of ranks: {name}",
            ("ranks", *(column for unit in units for column in (f"{unit}, raw", "dualdist"))),
            tuple(_ranks_row(result) for result in results if _name(result) == name),
            (RESOURCES_NOTE,),
        )


def _name(result: dict[str, Any]) -> str:
    return str(RunConfig(result["backend"], result["transport"], result["launcher"]))


def _ranks_row(result: dict[str, Any]) -> tuple[str, ...]:
    times = [result["parts"][name][kind]["value"] * 1e3 for name in ("init", TOTAL) for kind in KINDS]
    used = [(result["resources"][kind][name], name) for name in RESOURCES for kind in KINDS]
    cells = ["-" if value is None else f"{value / (1 if name == 'sockets' else 1 << 20):.0f}" for value, name in used]
    return (str(result["ranks"]), *(f"{value:.0f}" for value in times), *cells)


def _part_row(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    overhead = part["overhead_s"]
    cells = (part["raw"]["value"], part["dualdist"]["value"], part["min_raw"], part["min_dualdist"])
    interval = f"{overhead['low'] * 1e3:+.1f} to {overhead['high'] * 1e3:+.1f}"
    return (name, *(f"{seconds * 1e3:.1f}" for seconds in cells), f"{overhead['value'] * 1e3:+.1f}", interval)

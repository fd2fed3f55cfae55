"""`dualdist bench startup`: fresh jobs, dualdist and the library below it in turn, from import to a collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from dualdist.bench.jobs import FOREIGN, MeasurementSettings, PlannedJob, RunConfig, program_command
from dualdist.bench.report import FigureTable
from dualdist.bench.statistics import estimate, is_loaded, noise, ratio, subtracted
from dualdist.errors import UsageError
from dualdist.launch.launchers import Site
from dualdist.utils.suggest import require_choice

SCRIPT = Path(__file__).parent / "ranks" / "cold_start.py"
KINDS = ("raw", "dualdist")
LIBRARIES = {"native": "torch.distributed", "horovod": "horovod.torch", "mpi": "mpi4py"}
# What a rank holds after its second allreduce; of memory the unit is MiB in tables.
HELD = ("peak_bytes", "own_bytes", "sockets")
PHASES = ("torch", "import", "init", "first", "second")
# Sums of phases. dualdist imports a backend's library in init, so that only sums can be held against each other.
SUMS = {
    "import and init": ("import", "init"),
    "all, to the first collective": ("torch", "import", "init", "first"),
}
EXPLAINED = (
    "torch: import torch; import: of the library, beside torch (dualdist, which comes before torch, imports its "
    "backend's in init); init begins when all ranks have imported; first, second: allreduces of 8 bytes; each is the "
    "slowest rank's"
)

GROWN = (
    "times as above, all ranks on one machine; peak: the most memory of a rank that was resident; own: what it shares "
    "with no other process after the second allreduce; the rank that holds the most, the median over rounds"
)


def where_raw_starts(places: Sequence[RunConfig], *, launcher_was_named: bool) -> list[RunConfig]:
    """The places by the launcher that starts the raw library itself, which has no other way to find its ranks."""
    if launcher_was_named:
        raise UsageError("bench startup takes no --launcher: each raw library is started by the launcher that it knows")
    return [RunConfig(place.backend, place.transport, _launcher(place)) for place in places]


def _launcher(place: RunConfig) -> str:
    require_choice(place.backend, LIBRARIES, "backend")
    if place.backend == "native":
        return "torchrun"
    return "mpirun" if "mpi" in (place.backend, place.transport) else "horovodrun"


def plan(
    places: Sequence[RunConfig], settings: Sequence[MeasurementSettings], site: Site, folder: Path, *, rounds: int
) -> Iterator[PlannedJob]:
    """Two jobs for each round, place and setting (a number of ranks); who comes first changes with every round."""
    for number in range(rounds):
        for place, setting in itertools.product(places, settings):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                yield _job(place, setting, site, folder, kind, number)


def _job(
    place: RunConfig, setting: MeasurementSettings, site: Site, folder: Path, kind: str, number: int
) -> PlannedJob:
    own = folder / f"startup-{place.backend}-{place.transport or 'own'}-{setting.ranks}-{kind}-{number}"
    program = (str(SCRIPT), kind, place.backend, str(setting.ranks), str(own), setting.device)
    reports = tuple(own / f"{rank}.json" for rank in range(setting.ranks))
    name = LIBRARIES[place.backend] if kind == "raw" else f"dualdist {place.backend}"
    what = f"round {number + 1}, start-up of {name}, {setting.ranks} ranks, {place}"
    tags = {"place": place, "kind": kind, "ranks": setting.ranks, "launch": number}
    return PlannedJob(what, program_command(place, program, setting, site), reports, tags)


def judge(done: Sequence[tuple[PlannedJob, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """One result for every place and number of ranks, place by place, from the rounds that both libraries ended."""
    rounds: dict[tuple[RunConfig, int, int], dict[str, list[dict[str, Any]]]] = {}
    for planned, reports in done:
        tags = planned.tags
        rounds.setdefault((tags["place"], tags["ranks"], tags["launch"]), {})[tags["kind"]] = reports
    groups: dict[tuple[RunConfig, int], dict[str, list[list[dict[str, Any]]]]] = {}
    for (place, ranks, _), found in rounds.items():
        if len(found) == len(KINDS):
            group = groups.setdefault((place, ranks), {kind: [] for kind in KINDS})
            for kind, reports in found.items():
                group[kind].append(reports)
    places = list(dict.fromkeys(place for place, _ in groups))
    return [_result(one, kinds) for place in places for (one, _), kinds in groups.items() if one == place]


def _result(place: RunConfig, kinds: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    parts = {name: (name,) for name in PHASES} | SUMS
    seconds = {
        kind: {part: [_slowest(reports, phases) for reports in jobs] for part, phases in parts.items()}
        for kind, jobs in kinds.items()
    }
    foreign = [
        _worse(*pair) for pair in zip(*([_foreign(job) for job in jobs] for jobs in kinds.values()), strict=True)
    ]
    loaded = [[is_loaded(value) for value in foreign]]
    quiet = noise([foreign], [seconds["raw"]["all, to the first collective"]])
    return {
        "backend": place.backend,
        "transport": place.transport,
        "launcher": place.launcher,
        "library": LIBRARIES[place.backend],
        "ranks": len(kinds["raw"][0]),
        "rounds": len(kinds["raw"]),
        "held": {kind: {name: _most(jobs, name) for name in HELD} for kind, jobs in kinds.items()},
        "noise": {**asdict(quiet), "is_noisy": quiet.is_noisy, "words": str(quiet)},
        "parts": {
            part: {
                **{kind: asdict(estimate([seconds[kind][part]])) for kind in KINDS},
                **{f"least_{kind}": min(seconds[kind][part]) for kind in KINDS},
                "above_raw_s": asdict(estimate([subtracted(seconds["dualdist"][part], seconds["raw"][part])])),
                "over_raw": asdict(ratio([seconds["dualdist"][part]], [seconds["raw"][part]], loaded)),
            }
            for part in parts
        },
    }


def _slowest(reports: list[dict[str, Any]], phases: Sequence[str]) -> float:
    return max(float(sum(report["seconds"][phase] for phase in phases)) for report in reports)


def _most(jobs: list[list[dict[str, Any]]], name: str) -> float | None:
    """Of the rank that holds the most; the median over the jobs."""
    found = [max(report[name] for report in job) for job in jobs if all(report[name] is not None for report in job)]
    return median(found) if found else None


def _foreign(reports: list[dict[str, Any]]) -> float | None:
    found: float | None = reports[0][FOREIGN]
    return found


def _worse(first: float | None, second: float | None) -> float | None:
    known = [value for value in (first, second) if value is not None]
    return max(known) if known else None


def tables(results: Sequence[dict[str, Any]]) -> Iterator[FigureTable]:
    """One table for each result, and one for each place about what grows with the number of ranks."""
    for result in results:
        yield FigureTable(
            f"start-up of {_where(result)}, {result['ranks']} ranks, {result['rounds']} "
            "rounds of fresh processes, warm disk",
            ("phase", f"{result['library']} ms", "dualdist ms", "least raw", "least", "above raw ms", "95%"),
            tuple(_row(name, part) for name, part in result["parts"].items()),
            (EXPLAINED, f"machine: {result['noise']['words']}"),
        )
    for where in dict.fromkeys(_where(result) for result in results):
        yield FigureTable(
            f"what a rank takes as their number grows: {where}",
            (
                "ranks",
                "init ms raw",
                "dualdist",
                "to the first ms raw",
                "dualdist",
                "peak MiB raw",
                "dualdist",
                "own MiB raw",
                "dualdist",
                "sockets raw",
                "dualdist",
            ),
            tuple(_grown(result) for result in results if _where(result) == where),
            (GROWN,),
        )


def _where(result: dict[str, Any]) -> str:
    over = f" over {result['transport']}" if result["transport"] else ""
    return f"{result['backend']}{over}, {result['launcher']}"


def _grown(result: dict[str, Any]) -> tuple[str, ...]:
    parts = [result["parts"][name][kind]["value"] * 1e3 for name in ("init", list(SUMS)[-1]) for kind in KINDS]
    held = [(result["held"][kind][name], name) for name in HELD for kind in KINDS]
    words = ["-" if value is None else f"{value / (1 if name == 'sockets' else 1 << 20):.0f}" for value, name in held]
    return (str(result["ranks"]), *(f"{value:.0f}" for value in parts), *words)


def _row(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    above = part["above_raw_s"]
    cells = (part["raw"]["value"], part["dualdist"]["value"], part["least_raw"], part["least_dualdist"])
    interval = f"{above['low'] * 1e3:+.1f} to {above['high'] * 1e3:+.1f}"
    return (name, *(f"{seconds * 1e3:.1f}" for seconds in cells), f"{above['value'] * 1e3:+.1f}", interval)

"""`dualdist bench startup`: fresh jobs, dualdist and the library below it in turn, from import to a collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualdist.compare.jobs import FOREIGN, Place, Planned, Setting, program_command
from dualdist.compare.report import Table
from dualdist.compare.statistics import estimate, is_loaded, noise, ratio, subtracted
from dualdist.errors import UsageError
from dualdist.launchers import Site

SCRIPT = Path(__file__).with_name("fresh") / "start.py"
KINDS = ("raw", "dualdist")
LIBRARIES = {"native": "torch.distributed", "horovod": "horovod.torch", "mpi": "mpi4py"}
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


def where_raw_starts(places: Sequence[Place], *, launcher_was_named: bool) -> list[Place]:
    """The places by the launcher that starts the raw library itself, which has no other way to find its ranks."""
    if launcher_was_named:
        raise UsageError("bench startup takes no --launcher: each raw library is started by the launcher that it knows")
    return [Place(place.backend, place.transport, _launcher(place)) for place in places]


def _launcher(place: Place) -> str:
    if place.backend not in LIBRARIES:
        raise UsageError(f"backend {place.backend!r}: expected one of {', '.join(LIBRARIES)}")
    if place.backend == "native":
        return "torchrun"
    return "mpirun" if "mpi" in (place.backend, place.transport) else "horovodrun"


def plan(places: Sequence[Place], setting: Setting, site: Site, folder: Path, *, rounds: int) -> Iterator[Planned]:
    """Two jobs a round and place; who comes first changes with every round."""
    for number in range(rounds):
        for place in places:
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                own = folder / f"startup-{place.backend}-{place.transport or 'own'}-{kind}-{number}"
                program = (str(SCRIPT), kind, place.backend, str(setting.ranks), str(own), setting.device)
                reports = tuple(own / f"{rank}.json" for rank in range(setting.ranks))
                tags = {"place": place, "kind": kind}
                name = LIBRARIES[place.backend] if kind == "raw" else f"dualdist {place.backend}"
                what = f"round {number + 1}, start-up of {name}, {place}"
                yield Planned(what, program_command(place, program, setting, site), reports, tags)


def judge(done: Sequence[tuple[Planned, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """One result for every place."""
    groups: dict[Place, dict[str, list[list[dict[str, Any]]]]] = {}
    for planned, reports in done:
        kinds = groups.setdefault(planned.tags["place"], {kind: [] for kind in KINDS})
        kinds[planned.tags["kind"]].append(reports)
    return [_result(place, kinds) for place, kinds in groups.items()]


def _result(place: Place, kinds: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
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


def _foreign(reports: list[dict[str, Any]]) -> float | None:
    found: float | None = reports[0][FOREIGN]
    return found


def _worse(first: float | None, second: float | None) -> float | None:
    known = [value for value in (first, second) if value is not None]
    return max(known) if known else None


def tables(results: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """One table a place."""
    for result in results:
        over = f" over {result['transport']}" if result["transport"] else ""
        yield Table(
            f"start-up of {result['backend']}{over}, {result['ranks']} ranks, {result['launcher']}, {result['rounds']} "
            "rounds of fresh processes, warm disk",
            ("phase", f"{result['library']} ms", "dualdist ms", "least raw", "least", "above raw ms", "95%"),
            tuple(_row(name, part) for name, part in result["parts"].items()),
            (EXPLAINED, f"machine: {result['noise']['words']}"),
        )


def _row(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    above = part["above_raw_s"]
    cells = (part["raw"]["value"], part["dualdist"]["value"], part["least_raw"], part["least_dualdist"])
    interval = f"{above['low'] * 1e3:+.1f} to {above['high'] * 1e3:+.1f}"
    return (name, *(f"{seconds * 1e3:.1f}" for seconds in cells), f"{above['value'] * 1e3:+.1f}", interval)

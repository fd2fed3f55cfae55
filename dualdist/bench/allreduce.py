"""`dualdist bench allreduce`: its jobs, and latency and bandwidth of dualdist beside the library below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualdist.bench.cases import AllreduceOptions
from dualdist.bench.jobs import MeasurementSettings, PlannedJob, RunConfig, worker_command
from dualdist.bench.report import FigureTable, size_words
from dualdist.bench.statistics import estimate, is_loaded, noise, pooled, ratio, subtracted
from dualdist.launch.launchers import Site

# Name of a call in a report: the raw call that it is held against.
PAIRS = {"dualdist_": "raw_", "dualdist": "raw"}
KINDS = {"dualdist_": "in place", "dualdist": "new tensor"}
FORMULAS = (
    "GB/s: algorithm bandwidth is bytes / time, bus bandwidth that times 2 (n - 1) / n "
    "(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md); a time is the slowest rank's"
)


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """GB/s at which an operation worked its way through its bytes (nccl-tests, doc/PERFORMANCE.md)."""
    return nbytes / seconds / 1e9


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    """GB/s that an allreduce must have moved over each rank's link at least: independent of the number of ranks, so
    that it can be held against the hardware's (nccl-tests, doc/PERFORMANCE.md, "AllReduce").
    """
    return algorithm_bandwidth(nbytes, seconds) * 2 * (ranks - 1) / ranks


def plan(
    where: Sequence[RunConfig],
    options: AllreduceOptions,
    setting: MeasurementSettings,
    site: Site,
    folder: Path,
    *,
    launches: int,
) -> Iterator[PlannedJob]:
    """One job for every place and launch; every launch visits all places before the next one does."""
    for launch in range(launches):
        for place in where:
            name = f"allreduce-{place.backend}-{place.transport or 'own'}-{place.launcher}-{setting.ranks}-{launch}"
            file = folder / f"{name}.json"
            words = (
                "allreduce",
                f"--sizes={','.join(str(size) for size in options.sizes)}",
                f"--rounds={options.rounds}",
                f"--block-s={options.block_s:g}",
                f"--report={file}",
            )
            tags = {"place": place, "launch": launch, "ranks": setting.ranks}
            built = worker_command(place, words, setting, site)
            yield PlannedJob(f"allreduce on {setting.ranks} ranks, {place}", built, (file,), tags)


def judge(done: Sequence[tuple[PlannedJob, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """One result for every place and number of ranks."""
    groups: dict[tuple[RunConfig, int], list[dict[str, Any]]] = {}
    for planned, reports in done:
        groups.setdefault((planned.tags["place"], planned.tags["ranks"]), []).extend(reports)
    return [_result(reports) for reports in groups.values()]


def _result(reports: list[dict[str, Any]]) -> dict[str, Any]:
    first = reports[0]
    by_size = list(zip(*(report["sizes"] for report in reports), strict=True))
    foreign = [[value for size in report["sizes"] for value in size["foreign_cores"]] for report in reports]
    # Each size has a time of its own: the machine's noise is judged by how rounds deviate from their size's median.
    quiet = noise(foreign, [_relative(size["seconds"]["raw_"]) for report in reports for size in report["sizes"]])
    return {
        **{name: first[name] for name in ("ranks", "backend", "transport", "launcher", "device", "threads", "library")},
        "rounds": first["options"]["rounds"],
        "launches": len(reports),
        "noise": {**asdict(quiet), "is_noisy": quiet.is_noisy, "words": str(quiet)},
        "sizes": [_size(sizes, first["ranks"]) for sizes in by_size],
    }


def _relative(seconds: list[float]) -> list[float]:
    centre = pooled([seconds])
    return [value / centre for value in seconds]


def _size(sizes: Sequence[dict[str, Any]], ranks: int) -> dict[str, Any]:
    nbytes = sizes[0]["bytes"]
    seconds = {name: [size["seconds"][name] for size in sizes] for name in sizes[0]["seconds"]}
    loaded = [[is_loaded(value) for value in size["foreign_cores"]] for size in sizes]
    return {
        "bytes": nbytes,
        "repeats": [size["repeats"] for size in sizes],
        "calls": {
            name: {
                "seconds": asdict(estimate(rounds)),
                "least_seconds": min(min(values) for values in rounds),
                "algorithm_gb_s": algorithm_bandwidth(nbytes, pooled(rounds)),
                "bus_gb_s": bus_bandwidth(nbytes, pooled(rounds), ranks),
            }
            for name, rounds in seconds.items()
        },
        "over_raw": {name: asdict(ratio(seconds[name], seconds[raw], loaded)) for name, raw in PAIRS.items()},
        "above_raw_s": {
            name: asdict(estimate([subtracted(a, b) for a, b in zip(seconds[name], seconds[raw], strict=True)]))
            for name, raw in PAIRS.items()
        },
    }


def tables(results: Sequence[dict[str, Any]]) -> Iterator[FigureTable]:
    """One table for a result and a kind of call."""
    for result in results:
        for name, raw in PAIRS.items():
            yield FigureTable(
                f"allreduce {KINDS[name]}, float32 sum, {result['ranks']} ranks, {result['backend']} over "
                f"{result['transport']}, {result['launcher']}, {result['device']}, {result['threads']} thread(s) "
                f"a rank, {result['launches']} launch(es) of {result['rounds']} rounds",
                (
                    "size",
                    f"{result['library']} us",
                    "dualdist us",
                    "least raw",
                    "least",
                    "above raw us",
                    "95%",
                    "ratio",
                    "95% ",
                    "alg GB/s",
                    "bus GB/s",
                    "raw bus",
                ),
                tuple(_row(size, name, raw) for size in result["sizes"]),
                (FORMULAS, f"machine: {result['noise']['words']}"),
            )


def _row(size: dict[str, Any], name: str, raw: str) -> tuple[str, ...]:
    ours, theirs = size["calls"][name], size["calls"][raw]
    above, over = size["above_raw_s"][name], size["over_raw"][name]["median"]
    return (
        size_words(size["bytes"]),
        f"{theirs['seconds']['value'] * 1e6:.1f}",
        f"{ours['seconds']['value'] * 1e6:.1f}",
        f"{theirs['least_seconds'] * 1e6:.1f}",
        f"{ours['least_seconds'] * 1e6:.1f}",
        f"{above['value'] * 1e6:+.1f}",
        f"{above['low'] * 1e6:+.1f} to {above['high'] * 1e6:+.1f}",
        f"{over['value']:.3f}",
        f"{over['low']:.3f} to {over['high']:.3f}",
        f"{ours['algorithm_gb_s']:.3g}",
        f"{ours['bus_gb_s']:.3g}",
        f"{theirs['bus_gb_s']:.3g}",
    )

"""`dualdist bench state`: time and peak memory of broadcasting, saving and loading a large model, beside torch's."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dualdist.bench.jobs import (
    STATE_CALLS,
    Done,
    MeasurementSettings,
    PlannedJob,
    RunConfig,
    StateOptions,
    plan_launches,
)
from dualdist.bench.report import ReportTable, format_ranks, format_size
from dualdist.bench.statistics import bootstrap_median, machine_noise, time_ratio

NOTE = (
    "peak: of the rank that uses most, the largest resident size during the call minus that after it, median over "
    "rounds; times are the slowest rank's. Files stay in the page cache"
)


def plan_jobs(
    configs: Sequence[RunConfig],
    options: StateOptions,
    settings: MeasurementSettings,
    folder: Path,
    *,
    launches: int,
) -> Iterator[PlannedJob]:
    title = f"state of {format_size(options.nbytes)}"
    return plan_launches("state", title, configs, options, settings, folder, launches=launches)


def summarize(done: Done) -> list[dict[str, Any]]:
    """Return one result per configuration."""
    groups: dict[RunConfig, list[dict[str, Any]]] = {}
    for planned, reports in done:
        groups.setdefault(planned.tags["config"], []).extend(reports)
    return [_result(reports) for reports in groups.values()]


def _result(reports: list[dict[str, Any]]) -> dict[str, Any]:
    first = reports[0]
    seconds = {name: [report["seconds"][name] for report in reports] for name in first["seconds"]}
    foreign = [report["foreign_cores"] for report in reports]
    return {
        **{name: first[name] for name in ("ranks", "num_nodes", "backend", "transport", "launcher", "threads")},
        "bytes": first["bytes"],
        "rounds": first["options"]["rounds"],
        "launches": len(reports),
        "noise": machine_noise(foreign, seconds["torch.load"]),
        "calls": {
            name: {
                "seconds": bootstrap_median(times),
                "peak_bytes": median(peak for report in reports for peak in report["peak_bytes"][name]),
            }
            for name, times in seconds.items()
        },
        "ratio_to_torch": {
            ours: time_ratio(seconds[ours], seconds[torch], foreign) for ours, torch in STATE_CALLS.items()
        },
    }


def tables(results: Sequence[dict[str, Any]]) -> Iterator[ReportTable]:
    """Yield one table per result."""
    for result in results:
        yield ReportTable(
            f"state of {format_size(result['bytes'])}, {format_ranks(result)}, {result['backend']} over "
            f"{result['transport']}, {result['launcher']}, {result['threads']} thread(s) per rank, "
            f"{result['launches']} launch(es) of {result['rounds']} rounds",
            ("call", "s", "peak MiB", "torch's", "s ", "peak MiB ", "ratio", "95%"),
            tuple(_row(result, ours, torch) for ours, torch in STATE_CALLS.items()),
            (NOTE, f"machine: {result['noise']['summary']}"),
        )


def _row(result: dict[str, Any], ours: str, torch: str) -> tuple[str, ...]:
    cells = []
    for name in (ours, torch):
        call = result["calls"][name]
        cells += [name, f"{call['seconds']['value']:.2f}", f"{call['peak_bytes'] / 2**20:.0f}"]
    ratio = result["ratio_to_torch"][ours]["median"]
    return (*cells, f"{ratio['value']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}")

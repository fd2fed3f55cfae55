"""`dualdist bench state`: time and peak memory of broadcasting, saving and loading a large model, beside torch's."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from dualdist.bench.jobs import STATE_CALLS, Done, group_reports
from dualdist.bench.report import ReportTable, describe_runs, format_runs, format_size
from dualdist.bench.statistics import bootstrap_median, machine_noise, time_ratio

NOTE = (
    "peak: of the rank that uses most, the largest resident size during the call minus that after it, median over "
    "rounds; times are the slowest rank's. Files stay in the page cache"
)


def summarize(done: Done) -> list[dict[str, Any]]:
    """Return one result per configuration."""
    return [_result(reports) for reports in group_reports(done, "config").values()]


def _result(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = {name: [report["seconds"][name] for report in reports] for name in reports[0]["seconds"]}
    foreign = [report["foreign_cores"] for report in reports]
    return {
        **describe_runs(reports),
        "bytes": reports[0]["bytes"],
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
            f"state of {format_size(result['bytes'])}, {format_runs(result)}",
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

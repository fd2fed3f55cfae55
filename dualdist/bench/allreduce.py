"""`dualdist bench allreduce`: latency and bandwidth of dualdist's allreduce, the raw library's and DeepSpeed's."""

from collections.abc import Iterator, Sequence
from typing import Any

from dualdist.bench.jobs import Done, group_reports
from dualdist.bench.report import ReportTable, describe_runs, format_runs, format_size, format_us
from dualdist.bench.slow_link import link_bytes_s
from dualdist.bench.statistics import bootstrap_median, machine_noise, pooled_median, time_ratio

OURS = "dualdist_"  # dd.allreduce_(), which sums in place as the others do
# The raw library's, if it sums this dtype, and DeepSpeed's, if it is installed.
OTHER_CALLS = ("raw_", "deepspeed_")
COMMON_SIZES = (65536, 1 << 20, 25 << 20)  # up to DDP's bucket size: part of every default sweep
FORMULAS = (
    "GB/s: algorithm bandwidth is bytes / time, bus bandwidth that times 2 (n - 1) / n "
    "(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md); times are the slowest rank's"
)


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Return bytes / time in GB/s (nccl-tests, doc/PERFORMANCE.md)."""
    return nbytes / seconds / 1e9


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    """Return the GB/s that an allreduce moves over each rank's link at least (nccl-tests, doc/PERFORMANCE.md)."""
    return algorithm_bandwidth(nbytes, seconds) * 2 * (ranks - 1) / ranks


def sizes_up_to(max_bytes: int) -> tuple[int, ...]:
    """Return 8 bytes times powers of 4, the common sizes and `max_bytes`, in ascending order."""
    powers = (8 * 4**power for power in range(32))
    return tuple(sorted({max_bytes, *(size for size in (*powers, *COMMON_SIZES) if size < max_bytes)}))


def summarize(done: Done, slow_link: str | None = None) -> list[dict[str, Any]]:
    """Return one result per configuration; `slow_link` is the link's rate."""
    return [_result(reports, slow_link) for reports in group_reports(done, "config").values()]


def _result(reports: Sequence[dict[str, Any]], slow_link: str | None) -> dict[str, Any]:
    first = reports[0]
    foreign = [[value for size in report["sizes"] for value in size["foreign_cores"]] for report in reports]
    samples = [size["seconds"].get("raw_", size["seconds"][OURS]) for report in reports for size in report["sizes"]]
    return {
        "link": None if slow_link is None else {"rate": slow_link, "gb_s": link_bytes_s(slow_link) / 1e9},
        **describe_runs(reports),
        "library": first["library"],
        "note": first["note"],
        "noise": machine_noise(foreign, samples),
        "sizes": [_size(sizes, first["ranks"]) for sizes in zip(*(report["sizes"] for report in reports), strict=True)],
    }


def _size(sizes: Sequence[dict[str, Any]], ranks: int) -> dict[str, Any]:
    nbytes = sizes[0]["bytes"]
    others = [name for name in OTHER_CALLS if name in sizes[0]["seconds"]]
    seconds = {name: [size["seconds"][name] for size in sizes] for name in sizes[0]["seconds"]}
    foreign = [size["foreign_cores"] for size in sizes]
    return {
        "dtype": sizes[0]["dtype"],
        "bytes": nbytes,
        "repeats": [size["repeats"] for size in sizes],
        "calls": {
            name: {
                "seconds": bootstrap_median(rounds),
                "min_seconds": min(min(values) for values in rounds),
                "algorithm_gb_s": algorithm_bandwidth(nbytes, pooled_median(rounds)),
                "bus_gb_s": bus_bandwidth(nbytes, pooled_median(rounds), ranks),
            }
            for name, rounds in seconds.items()
        },
        "ratios": {name: time_ratio(seconds[OURS], seconds[name], foreign) for name in others},
    }


def tables(results: Sequence[dict[str, Any]]) -> Iterator[ReportTable]:
    """Yield one table per result and dtype."""
    for result in results:
        link = result["link"]
        notes = [FORMULAS, f"machine: {result['noise']['summary']}", *filter(None, [result["note"]])]
        if link is not None:
            notes.append(
                f"link: {link['rate']} in each direction; an allreduce between two hosts moves each byte once in each, "
                f"at least, so its algorithm bandwidth is {link['gb_s']:.3g} GB/s at most"
            )
        labels = {"raw_": result["library"], "deepspeed_": "DeepSpeed"}
        for dtype in dict.fromkeys(size["dtype"] for size in result["sizes"]):
            sizes = [size for size in result["sizes"] if size["dtype"] == dtype]
            others = [name for name in OTHER_CALLS if name in sizes[0]["calls"]]
            columns = ["size", "dualdist us", "dualdist min", "alg GB/s", "bus GB/s"]
            for number, label in enumerate(labels[name] for name in others):
                columns += [f"{label} us", f"{label} min", f"{label} bus", f"over {label}", f"95%{' ' * number}"]
            title = f"allreduce in place, {dtype} sum, {format_runs(result)}"
            yield ReportTable(title, tuple(columns), tuple(_row(size, others) for size in sizes), tuple(notes))


def _row(size: dict[str, Any], others: Sequence[str]) -> tuple[str, ...]:
    ours = size["calls"][OURS]
    cells = [format_size(size["bytes"]), format_us(ours["seconds"]["value"]), format_us(ours["min_seconds"])]
    cells += [f"{ours['algorithm_gb_s']:.3g}", f"{ours['bus_gb_s']:.3g}"]
    for name in others:
        call, ratio = size["calls"][name], size["ratios"][name]["median"]
        cells += [format_us(call["seconds"]["value"]), format_us(call["min_seconds"]), f"{call['bus_gb_s']:.3g}"]
        cells += [f"{ratio['value']:.3f}", f"{ratio['low']:.3f} to {ratio['high']:.3f}"]
    return tuple(cells)

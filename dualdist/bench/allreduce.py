"""`dualdist bench allreduce`: latency and bandwidth of dualdist's allreduce, the raw library's and DeepSpeed's."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualdist.bench.jobs import AllreduceOptions, Done, MeasurementSettings, PlannedJob, RunConfig, plan_launches
from dualdist.bench.report import ReportTable, format_ranks, format_size, format_us
from dualdist.bench.slow_link import link_bytes_s
from dualdist.bench.statistics import bootstrap_median, machine_noise, pooled_median, time_difference, time_ratio

# The calls that each is compared with: the raw library's, if it sums this dtype, and DeepSpeed's, if it is installed.
OTHER_CALLS = {"dualdist_": ("raw_", "deepspeed_"), "dualdist": ("raw",)}
LABELS = {"deepspeed_": "DeepSpeed"}
KINDS = {"dualdist_": "in place", "dualdist": "new tensor"}
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


def plan_jobs(
    configs: Sequence[RunConfig],
    options: AllreduceOptions,
    settings: MeasurementSettings,
    folder: Path,
    *,
    launches: int,
) -> Iterator[PlannedJob]:
    title = f"allreduce on {settings.ranks} ranks"
    return plan_launches("allreduce", title, configs, options, settings, folder, launches=launches)


def summarize(done: Done, slow_link: str | None = None) -> list[dict[str, Any]]:
    """Return one result per configuration and number of ranks; `slow_link` is the link's rate."""
    groups: dict[tuple[RunConfig, int], list[dict[str, Any]]] = {}
    for planned, reports in done:
        groups.setdefault((planned.tags["config"], planned.tags["ranks"]), []).extend(reports)
    return [_result(reports, slow_link) for reports in groups.values()]


def _result(reports: list[dict[str, Any]], slow_link: str | None) -> dict[str, Any]:
    first = reports[0]
    foreign = [[value for size in report["sizes"] for value in size["foreign_cores"]] for report in reports]
    samples = [
        size["seconds"].get("raw_", size["seconds"]["dualdist_"]) for report in reports for size in report["sizes"]
    ]
    return {
        "link": None if slow_link is None else {"rate": slow_link, "gb_s": link_bytes_s(slow_link) / 1e9},
        **{name: first[name] for name in ("ranks", "num_nodes", "backend", "transport")},
        **{name: first[name] for name in ("launcher", "device", "threads", "library", "note")},
        "rounds": first["options"]["rounds"],
        "launches": len(reports),
        "noise": machine_noise(foreign, samples),
        "sizes": [_size(sizes, first["ranks"]) for sizes in zip(*(report["sizes"] for report in reports), strict=True)],
    }


def _size(sizes: Sequence[dict[str, Any]], ranks: int) -> dict[str, Any]:
    nbytes = sizes[0]["bytes"]
    pairs = [(ours, other) for ours, others in OTHER_CALLS.items() for other in others if other in sizes[0]["seconds"]]
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
        "ratios": {other: time_ratio(seconds[ours], seconds[other], foreign) for ours, other in pairs},
        "overheads_s": {other: time_difference(seconds[ours], seconds[other]) for ours, other in pairs},
    }


def tables(results: Sequence[dict[str, Any]]) -> Iterator[ReportTable]:
    """Yield one table per result and kind of call."""
    for result in results:
        library, link = result["library"], result["link"]
        notes = [FORMULAS, f"machine: {result['noise']['summary']}", *filter(None, [result["note"]])]
        if link is not None:
            notes.append(
                f"link: {link['rate']} in each direction; an allreduce between two hosts moves each byte once in each, "
                f"at least, so its algorithm bandwidth is {link['gb_s']:.3g} GB/s at most"
            )
        for dtype in dict.fromkeys(size["dtype"] for size in result["sizes"]):
            sizes = [size for size in result["sizes"] if size["dtype"] == dtype]
            for name, others in OTHER_CALLS.items():
                labels = {other: LABELS.get(other, library) for other in others if other in sizes[0]["calls"]}
                yield ReportTable(
                    f"allreduce {KINDS[name]}, {dtype} sum, {format_ranks(result)}, {result['backend']} over "
                    f"{result['transport']}, {result['launcher']}, {result['device']}, {result['threads']} thread(s) "
                    f"per rank, {result['launches']} launch(es) of {result['rounds']} rounds",
                    tuple(_columns(labels)),
                    tuple(tuple(_cells(size, name, labels)) for size in sizes),
                    tuple(notes),
                )


def _columns(labels: Mapping[str, str]) -> Iterator[str]:
    yield from ("size", "dualdist us", "dualdist min", "alg GB/s", "bus GB/s")
    for number, label in enumerate(labels.values()):
        yield from (f"{label} us", f"{label} min", f"{label} bus", f"over {label}", f"95%{' ' * number}")


def _cells(size: dict[str, Any], name: str, labels: Mapping[str, str]) -> Iterator[str]:
    ours = size["calls"][name]
    yield format_size(size["bytes"])
    yield from map(format_us, (ours["seconds"]["value"], ours["min_seconds"]))
    yield from (f"{ours['algorithm_gb_s']:.3g}", f"{ours['bus_gb_s']:.3g}")
    for other in labels:
        theirs, ratio = size["calls"][other], size["ratios"][other]["median"]
        yield from map(format_us, (theirs["seconds"]["value"], theirs["min_seconds"]))
        yield f"{theirs['bus_gb_s']:.3g}"
        yield from (f"{ratio['value']:.3f}", f"{ratio['low']:.3f} to {ratio['high']:.3f}")

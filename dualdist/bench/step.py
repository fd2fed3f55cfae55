"""`dualdist bench step`: the time of one training step, its ratio to DDP and raw Horovod, and peak memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from dualdist.backends import registry
from dualdist.bench.jobs import (
    BASELINES,
    DUALDIST,
    METHODS,
    MODELS,
    Done,
    MeasurementSettings,
    PlannedJob,
    RunConfig,
    StepOptions,
    check_method,
    group_reports,
    worker_command,
)
from dualdist.bench.report import ReportTable, describe_runs, format_ms, format_runs
from dualdist.bench.slow_link import link_bytes_s
from dualdist.bench.statistics import bootstrap_median, machine_noise, time_ratio
from dualdist.errors import UsageError

DEFAULT_METHODS = ("none", "ddp", "ddp_view", DUALDIST, "naive")
# Fewer, as Horovod's idle engine slows other communication in the same process.
METHODS_ON_HOROVOD = ("none", "ddp", DUALDIST, "hvd")
SENT_NOTE = "sent: gradients that a rank gives to the reduction in a step, as they are sent"
# A baseline that is computed: the longer of a step without communication and the time of the gradients on the link.
LINK_BOUND = "link_bound"
TIME_COLUMNS = (
    *("contender", "step ms", "95%", "min ms"),
    *("CPU ms, all ranks", "peak MiB", "sent MiB", "equal on all ranks"),
)
MEMORY_NOTE = "peak memory: of one process with this contender alone, minus its memory before init"


def choose_methods(names: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """Return the methods to time, by default those that suit the backend; raise UsageError if they cannot run on it."""
    on_horovod = registry.uses_library(config.backend, registry.HOROVOD_LIBRARY)
    names = names or (METHODS_ON_HOROVOD if on_horovod else DEFAULT_METHODS)
    for name in names:
        check_method(name)
    if len(set(names)) < len(names):
        raise UsageError(f"contenders {','.join(names)!r}: expected each of them once")
    if "hvd" in names and not on_horovod:
        raise UsageError(f"contender 'hvd' is raw Horovod and needs --backend horovod, not {config.backend}")
    return tuple(names)


def plan_jobs(
    configs: Sequence[RunConfig],
    options: Sequence[StepOptions],
    settings: MeasurementSettings,
    folder: Path,
    *,
    launches: int,
    with_memory: bool,
) -> Iterator[PlannedJob]:
    """Yield all jobs: every launch runs all models and configurations before the next."""
    cases = [(each, config, choose_methods(each.contenders, config)) for each in options for config in configs]
    wanted = [("step", launch, *case) for launch in range(launches) for case in cases]
    if with_memory:
        wanted += [("memory", 0, each, config, (name,)) for each, config, methods in cases for name in methods]
    for kind, launch, each, config, methods in wanted:
        key = [kind, each.model, config.backend, config.transport or "own", config.launcher, *methods, str(launch)]
        file = folder / f"{'-'.join(key)}.json"
        reports = [file]
        title = f"{kind} of {each.model}, {config}"
        if kind == "memory":
            reports = [file.with_suffix(f".{rank}.json") for rank in range(settings.ranks)]
            title += f", {methods[0]}"
        tags = {"kind": kind, "model": each.model, "config": config, "contenders": methods, "launch": launch}
        command = worker_command(config, kind, replace(each, contenders=methods), file, settings)
        yield PlannedJob(title, command, tuple(reports), tags)


def summarize(done: Done, slow_link: str | None = None) -> list[dict[str, Any]]:
    """Return one result per model and configuration, in the order of measurement; `slow_link` is the link's rate."""
    steps = [each for each in done if each[0].tags["kind"] == "step"]
    memory = [each for each in done if each[0].tags["kind"] == "memory"]
    peaks: dict[Any, dict[str, int | None]] = {}
    for (model, config, (name,)), reports in group_reports(memory, "model", "config", "contenders").items():
        known = [report["peak_bytes"] for report in reports if report["peak_bytes"] is not None]
        peaks.setdefault((model, config), {})[name] = max(known, default=None)
    return [
        _result(key[0], reports, peaks.get(key, {}), slow_link)
        for key, reports in group_reports(steps, "model", "config").items()
    ]


def _result(
    model: str, reports: Sequence[dict[str, Any]], peaks: dict[str, int | None], slow_link: str | None
) -> dict[str, Any]:
    first = reports[0]
    names = list(first["seconds"])
    seconds = {name: [report["seconds"][name] for report in reports] for name in names}
    foreign = [report["foreign_cores"] for report in reports]
    baselines = {name: seconds[name] for name in BASELINES if name in names}
    noise = machine_noise(foreign, next(iter(baselines.values()), seconds[names[0]]))
    link = None
    if slow_link is not None:
        link = {"rate": slow_link, "gradient_s": first["gradient_bytes"] / link_bytes_s(slow_link)}
        if "none" in names:
            baselines[LINK_BOUND] = [[max(each, link["gradient_s"]) for each in rounds] for rounds in seconds["none"]]
    return {
        "model": model,
        "link": link,
        **describe_runs(reports),
        **{name: first[name] for name in ("parameters", "tensors", "gradient_bytes", "difference_from")},
        "batch": first["options"]["batch"] or MODELS[model].batch,
        "image_size": first["options"]["image_size"] if "resnet" in model else None,
        "steps": [report["steps"] for report in reports],
        "noise": noise,
        "contenders": {
            name: {
                "label": _label(name, first["backend"]),
                "seconds": bootstrap_median(seconds[name]),
                "min_seconds": min(min(rounds) for rounds in seconds[name]),
                "cpu_seconds": median(median(report["cpu_s"][name]) for report in reports),
                "peak_bytes": peaks.get(name),
                "sent_bytes": first["sent_bytes"][name],
                "identical_across_ranks": all(report["identical_across_ranks"][name] for report in reports),
                "max_difference": max((report["max_difference"].get(name, 0.0) for report in reports), default=0.0),
                "ratios": {
                    baseline: time_ratio(seconds[name], rounds, foreign)
                    for baseline, rounds in baselines.items()
                    if baseline != name and (name, baseline) != ("none", LINK_BOUND)
                },
            }
            for name in names
        },
    }


def _label(method: str, backend: str) -> str:
    if method == DUALDIST:
        return f"dualdist {backend}"
    return METHODS.get(method, f"dualdist {backend}, {method}")


def tables(results: Sequence[dict[str, Any]]) -> Iterator[ReportTable]:
    """Yield two tables per result: step times, and their ratios to the baselines."""
    for result in results:
        contenders = result["contenders"]
        labels = {**{name: each["label"] for name, each in contenders.items()}, LINK_BOUND: "link bound"}
        image = f" at {result['image_size']}x{result['image_size']}" if result["image_size"] else ""
        steps = "/".join(map(str, sorted(set(result["steps"]))))
        title = (
            f"{result['model']} ({MODELS[result['model']].description}), batch {result['batch']} per rank{image}: "
            f"{format_runs(result)} of {steps} steps"
        )
        yield ReportTable(
            title,
            TIME_COLUMNS,
            tuple(_time_row(contender) for contender in contenders.values()),
            (f"machine: {result['noise']['summary']}", SENT_NOTE, *_warnings(result)),
        )
        yield ReportTable(
            "Step time over a baseline's, round by round",
            ("contender / baseline", "median", "95%", "without loaded rounds"),
            tuple(
                (f"{contender['label']} / {labels[baseline]}", *_ratio_cells(ratio))
                for contender in contenders.values()
                for baseline, ratio in contender["ratios"].items()
            ),
            tuple(_ratio_notes(result)),
        )


def _ratio_notes(result: dict[str, Any]) -> Iterator[str]:
    link = result["link"]
    if any(contender["peak_bytes"] for contender in result["contenders"].values()):
        yield MEMORY_NOTE
    if link is not None:
        yield (
            f"link bound: the longer of a step without communication and {format_ms(link['gradient_s'])} ms, which "
            f"{result['gradient_bytes'] / 2**20:.3g} MiB of gradients take at {link['rate']}: an allreduce between two "
            "hosts moves each byte over the link once in each direction, at least"
        )


def _time_row(contender: dict[str, Any]) -> tuple[str, ...]:
    seconds, peak = contender["seconds"], contender["peak_bytes"]
    return (
        contender["label"],
        format_ms(seconds["value"]),
        f"{format_ms(seconds['low'])} to {format_ms(seconds['high'])}",
        format_ms(contender["min_seconds"]),
        format_ms(contender["cpu_seconds"]),
        "-" if peak is None else f"{peak / 2**20:.0f}",
        f"{contender['sent_bytes'] / 2**20:.3g}",
        "yes" if contender["identical_across_ranks"] else "no",
    )


def _ratio_cells(ratio: dict[str, Any]) -> tuple[str, ...]:
    middle, quiet = ratio["median"], ratio["quiet_median"]
    return (
        f"{middle['value']:.3f}",
        f"{middle['low']:.3f} to {middle['high']:.3f}",
        "-" if quiet is None else f"{quiet:.3f} ({ratio['rounds'] - ratio['loaded_rounds']})",
    )


def _warnings(result: dict[str, Any]) -> Iterator[str]:
    contenders = result["contenders"]
    if result["ranks"] > 1:
        for name, contender in contenders.items():
            if name != "none" and not contender["identical_across_ranks"]:
                yield f"WRONG: {contender['label']} ended with different parameters on different ranks"
    different = {each["label"]: each["max_difference"] for each in contenders.values() if each["max_difference"]}
    if different:
        listed = ", ".join(f"{label} {value:.1e}" for label, value in different.items())
        base = _label(result["difference_from"], result["backend"])
        yield f"largest difference of a parameter from {base}: {listed}"
    if result["launches"] < 5:
        yield "memory placement shifts a launch by several percent: differences below 3% need --launches 5"
    if registry.uses_library(result["backend"], registry.HOROVOD_LIBRARY) and "ddp" in contenders:
        yield "an idle Horovod in the same process slows DDP here: compare Horovod with raw Horovod"

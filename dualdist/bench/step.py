"""`dualdist bench step`: its jobs, and what their reports say of each contender."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from dualdist.bench.cases import CONTENDERS, MODELS, REFERENCES, StepOptions, default_contenders
from dualdist.bench.jobs import MeasurementSettings, PlannedJob, RunConfig, worker_command
from dualdist.bench.report import FigureTable, milliseconds
from dualdist.bench.statistics import estimate, is_loaded, noise, ratio
from dualdist.errors import UsageError
from dualdist.launch.launchers import Site

HEADROOM = "peak memory is that of one process with this contender alone, above what it held before init"


def check(names: Sequence[str], place: RunConfig) -> None:
    """UsageError where the contenders are unknown, or cannot run in this place."""
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or len(set(names)) < len(names) or not names:
        raise UsageError(f"contenders {','.join(names)!r}: expected different ones of {', '.join(CONTENDERS)}")
    if "hvd" in names and place.backend != "horovod":
        raise UsageError(
            f"contender 'hvd' is raw Horovod, which runs in a job of --backend horovod, not {place.backend}"
        )


def plan(
    where: Sequence[RunConfig],
    options: Sequence[StepOptions],
    setting: MeasurementSettings,
    site: Site,
    folder: Path,
    *,
    launches: int,
    with_memory: bool,
) -> Iterator[PlannedJob]:
    """All jobs: every launch runs through all models and places before the next one does."""
    for launch in range(launches):
        for each in options:
            for place in where:
                chosen = each.contenders or default_contenders(place.backend)
                check(chosen, place)
                yield _job("step", place, each, chosen, setting, site, folder, launch)
    for each in options if with_memory else ():
        for place in where:
            for name in each.contenders or default_contenders(place.backend):
                yield _job("memory", place, each, (name,), setting, site, folder, 0)


def _job(
    kind: str,
    place: RunConfig,
    options: StepOptions,
    chosen: tuple[str, ...],
    setting: MeasurementSettings,
    site: Site,
    folder: Path,
    launch: int,
) -> PlannedJob:
    name = "-".join(
        [kind, options.model, place.backend, place.transport or "own", place.launcher, *chosen, str(launch)]
    )
    file = folder / f"{name}.json"
    words = [
        kind,
        f"--model={options.model}",
        f"--contenders={','.join(chosen)}",
        f"--batch={options.batch_size}",
        f"--image-size={options.image_size}",
        f"--report={file}",
    ]
    if kind == "step":
        words += [f"--rounds={options.rounds}", f"--steps={options.steps}", f"--block-s={options.block_s:g}"]
        words += [f"--warmup={options.warmup}"]
        reports: tuple[Path, ...] = (file,)
    else:
        reports = tuple(file.with_suffix(f".{rank}.json") for rank in range(setting.ranks))
    what = f"{kind} of {options.model}, {place}" + (f", {chosen[0]}" if kind == "memory" else "")
    tags = {"kind": kind, "model": options.model, "place": place, "contenders": chosen, "launch": launch}
    return PlannedJob(what, worker_command(place, words, setting, site), reports, tags)


def judge(done: Sequence[tuple[PlannedJob, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """One result for every model and place, in the order in which they were measured."""
    groups: dict[tuple[str, RunConfig], list[dict[str, Any]]] = {}
    peaks: dict[tuple[str, RunConfig, str], int | None] = {}
    for planned, reports in done:
        key = (planned.tags["model"], planned.tags["place"])
        if planned.tags["kind"] == "step":
            groups.setdefault(key, []).extend(reports)
        else:
            known = [report["peak_bytes"] for report in reports if report["peak_bytes"] is not None]
            peaks[(key[0], key[1], planned.tags["contenders"][0])] = max(known) if known else None
    return [
        _result(model, place, reports, {name: peaks.get((model, place, name)) for name in reports[0]["seconds"]})
        for (model, place), reports in groups.items()
    ]


def _result(
    model: str, place: RunConfig, reports: list[dict[str, Any]], peaks: dict[str, int | None]
) -> dict[str, Any]:
    names = list(reports[0]["seconds"])
    seconds = {name: [report["seconds"][name] for report in reports] for name in names}
    foreign = [report["foreign_cores"] for report in reports]
    loaded = [[is_loaded(value) for value in rounds] for rounds in foreign]
    references = [name for name in REFERENCES if name in names]
    quiet = noise(foreign, seconds[references[0] if references else names[0]])
    first = reports[0]
    return {
        "model": model,
        **{name: first[name] for name in ("ranks", "backend", "transport", "launcher", "device", "threads")},
        **{name: first[name] for name in ("parameters", "tensors", "gradient_bytes")},
        "batch": first["options"]["batch"],
        "image_size": first["options"]["image_size"] if "resnet" in model else None,
        "steps": [report["steps"] for report in reports],
        "rounds": first["options"]["rounds"],
        "launches": len(reports),
        "noise": {**asdict(quiet), "is_noisy": quiet.is_noisy, "words": str(quiet)},
        "contenders": {
            name: {
                "label": _label(name, first),
                "seconds": asdict(estimate(seconds[name])),
                "least_seconds": min(min(rounds) for rounds in seconds[name]),
                "cpu_seconds": median(median(report["cpu_s"][name]) for report in reports),
                "peak_bytes": peaks[name],
                "identical_across_ranks": all(report["identical_across_ranks"][name] for report in reports),
                "distance": max((report["distance"].get(name, 0.0) for report in reports), default=0.0),
                "over": {
                    reference: asdict(ratio(seconds[name], seconds[reference], loaded))
                    for reference in references
                    if reference != name
                },
            }
            for name in names
        },
        "distance_from": first["distance_from"],
    }


def _label(name: str, report: dict[str, Any]) -> str:
    return f"dualdist {report['backend']}" if name == "dualdist" else CONTENDERS[name]


def tables(results: Sequence[dict[str, Any]]) -> Iterator[FigureTable]:
    """Two tables a result: the step itself, and the ratios."""
    for result in results:
        each = result["contenders"]
        image = f" at {result['image_size']}x{result['image_size']}" if result["image_size"] else ""
        title = (
            f"{result['model']} ({MODELS[result['model']].what}), batch {result['batch']} a rank{image}: "
            f"{result['ranks']} ranks, {result['backend']} over {result['transport']}, {result['launcher']}, "
            f"{result['device']}, {result['threads']} thread(s) a rank, {result['launches']} launch(es) of "
            f"{result['rounds']} rounds of {'/'.join(str(steps) for steps in sorted(set(result['steps'])))} steps"
        )
        yield FigureTable(
            title,
            ("contender", "step ms", "95%", "least ms", "CPU ms, all ranks", "peak MiB", "same on all ranks"),
            tuple(_row(contender) for contender in each.values()),
            (f"machine: {result['noise']['words']}", *_warnings(result)),
        )
        yield FigureTable(
            "Step time over that of a reference, round by round",
            ("contender / reference", "median", "95%", "least round", "best / best", "quiet rounds only"),
            tuple(
                (f"{contender['label']} / {each[reference]['label']}", *_cells(found))
                for contender in each.values()
                for reference, found in contender["over"].items()
            ),
            (HEADROOM,) if any(contender["peak_bytes"] for contender in each.values()) else (),
        )


def _row(contender: dict[str, Any]) -> tuple[str, ...]:
    seconds, peak = contender["seconds"], contender["peak_bytes"]
    return (
        contender["label"],
        milliseconds(seconds["value"]),
        f"{milliseconds(seconds['low'])} to {milliseconds(seconds['high'])}",
        milliseconds(contender["least_seconds"]),
        milliseconds(contender["cpu_seconds"]),
        "-" if peak is None else f"{peak / 2**20:.0f}",
        "yes" if contender["identical_across_ranks"] else "no",
    )


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    middle = found["median"]
    quiet = "-" if found["quiet"] is None else f"{found['quiet']:.3f} ({found['rounds'] - found['loaded']})"
    interval = f"{middle['low']:.3f} to {middle['high']:.3f}"
    return f"{middle['value']:.3f}", interval, f"{found['minimum']:.3f}", f"{found['best']:.3f}", quiet


def _warnings(result: dict[str, Any]) -> Iterator[str]:
    if result["ranks"] > 1:
        for name, contender in result["contenders"].items():
            if name != "none" and not contender["identical_across_ranks"]:
                yield f"WRONG: {contender['label']} ended with different parameters on different ranks"
    apart = {
        contender["label"]: contender["distance"]
        for contender in result["contenders"].values()
        if contender["distance"]
    }
    if apart:
        first = CONTENDERS[result["distance_from"]]
        yield f"largest difference of a parameter from {first}: " + ", ".join(f"{k} {v:.1e}" for k, v in apart.items())
    if result["launches"] < 5:
        yield "one launch moves by several percent from memory placement alone: claims under 3% need --launches 5"
    if result["backend"] == "horovod" and "ddp" in result["contenders"]:
        yield "DDP ran beside an idle Horovod here, which slows it: hold Horovod against raw Horovod"

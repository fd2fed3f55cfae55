"""Program of a benchmark's ranks: python -m dualdist.bench.ranks.worker [--spawn N] step --model mlp --report FILE.

Rank 0 writes the report as JSON when all ranks are done, or prints it without --report. With --spawn this process
starts the ranks, and does not import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import dualdist as dd
from dualdist.bench.options import CONTENDERS, AllreduceOptions, StepOptions, TrainOptions
from dualdist.environments import detect
from dualdist.errors import DualdistError, UnsupportedError, UsageError
from dualdist.launch.spawn import spawn_without_main

Report = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or run one measurement as one of them; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.spawn:
        return max(spawn_without_main(main, args.spawn, (argv[1:],)))  # --spawn=N is the first argument
    try:
        report = MEASUREMENTS[args.measurement](args)
    except DualdistError as error:
        print(f"dualdist bench: {error}", file=sys.stderr, flush=True)
        return 1
    if report is not None:
        write_report(report, args.report)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the worker's command line."""
    root = argparse.ArgumentParser(prog="python -m dualdist.bench.ranks.worker")
    root.add_argument("--spawn", type=int)
    commands = root.add_subparsers(dest="measurement", required=True)
    for name in MEASUREMENTS:
        add = commands.add_parser(name).add_argument
        add("--report", type=Path)
        add("--device", default="auto")
        add("--timeout-s", type=float, default=300.0)
        add("--rounds", type=int, default=15)
        add("--block-s", type=float, default=0.4)
        if name == "train":
            _add_train_options(add)
        elif name == "allreduce":
            add("--sizes", required=True, type=_parse_sizes)
        else:
            add("--model", required=True)
            add("--contenders", required=True, type=parse_contenders)
            add("--batch", type=int, default=0)
            add("--image-size", type=int, default=StepOptions.image_size)
            add("--steps", type=int, default=0)
            add("--warmup", type=int, default=3)
    return root


def _add_train_options(add: Any) -> None:
    add("--model", required=True)
    add("--contender", required=True, choices=tuple(CONTENDERS))
    add("--folder", type=Path, required=True)
    for name in ("batch", "warmup", "steps", "image-size", "seed"):
        add(f"--{name}", type=int, required=True)
    add("--slowdown", type=float, default=1.0)
    add("--sizes", type=_parse_sizes, default=())


def _parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def parse_contenders(text: str) -> tuple[str, ...]:
    """Split at commas; raise UsageError for unknown or repeated names."""
    names = tuple(text.split(","))
    if not set(names) <= set(CONTENDERS) or len(set(names)) < len(names):
        raise UsageError(f"contenders {text!r}: expected different ones of {', '.join(CONTENDERS)}")
    return names


def _options(kind: type[Any], args: argparse.Namespace) -> Any:
    return kind(**{each.name: getattr(args, each.name) for each in fields(kind) if hasattr(args, each.name)})


def step(args: argparse.Namespace) -> Report | None:
    """Time the training step of all contenders."""
    from dualdist.bench.ranks.measurements import measure_steps

    return _in_session(args, measure_steps, _options(StepOptions, args))


def allreduce(args: argparse.Namespace) -> Report | None:
    """Time allreduces."""
    from dualdist.bench.ranks.measurements import measure_allreduces

    return _in_session(args, measure_allreduces, _options(AllreduceOptions, args))


def train(args: argparse.Namespace) -> Report | None:
    """Train one contender; report its allreduces if they were requested."""
    from dualdist.bench.ranks import measurements

    start_time = time.time()
    options: TrainOptions = _options(TrainOptions, args)
    report = _in_session(args, lambda each: measurements.train(each, args.folder, start_time), options)
    return report if options.sizes else None


def memory(args: argparse.Namespace) -> Report:
    """Measure one contender's peak memory; each rank writes a report, as there may be no session to gather them."""
    from dualdist.bench.ranks.measurements import measure_memory

    options: StepOptions = _options(StepOptions, args)
    (name,) = options.contenders
    topology, backend = detect(os.environ), os.environ.get("DUALDIST_BACKEND", "")
    report = measure_memory(name, backend, options, topology, Path(f"{args.report}.store"))
    if args.report is not None:
        args.report = args.report.with_suffix(f".{topology.rank}.json")
    return report


def _in_session(args: argparse.Namespace, measure: Callable[[Any], Report], options: Any) -> Report | None:
    """Measure between init() and shutdown(); return the report on rank 0, None elsewhere."""
    from dualdist import session
    from dualdist.diagnostics import recording

    dd.init(timeout_s=args.timeout_s)
    try:
        if args.device == "cuda" and dd.device().type != "cuda":
            raise UnsupportedError(
                "--device cuda, but torch sees no GPU here: leave it out, or hide no GPU from the ranks"
            )
        opened = session.current()
        run = recording.describe_run(opened.topology, dd.backend(), dd.transport(), opened.device)
        report = {**measure(options), "options": asdict(options), **run}
        return report if dd.rank() == 0 else None
    finally:
        dd.shutdown()


def write_report(report: Report, path: Path | None) -> None:
    """Write the report atomically, or print it."""
    text = json.dumps(report)
    if path is None:
        print(text, flush=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], Report | None]] = {
    "step": step,
    "allreduce": allreduce,
    "memory": memory,
    "train": train,
}

if __name__ == "__main__":
    # By its full name, so that spawned ranks can unpickle main().
    from dualdist.bench.ranks import worker

    raise SystemExit(worker.main())

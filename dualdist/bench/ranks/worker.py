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
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import dualdist as dd
from dualdist.bench.options import AllreduceOptions, StepOptions, TrainOptions
from dualdist.environments import detect
from dualdist.errors import DualdistError, UnsupportedError
from dualdist.launch.spawn import spawn_without_main

Report = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or run one measurement as one of them; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.spawn:
        return max(spawn_without_main(main, args.spawn, (argv[1:],)))  # --spawn=N is the first argument
    try:
        report = MEASUREMENTS[args.measurement][0](args)
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
    for name, (_, options) in MEASUREMENTS.items():
        add = commands.add_parser(name).add_argument
        add("--report", type=Path)
        if options is TrainOptions:
            add("--folder", type=Path, required=True)
        for each in fields(options):
            add(
                f"--{each.name.replace('_', '-')}",
                type=PARSERS[str(each.type)],
                required=each.default is MISSING,
                default=None if each.default is MISSING else each.default,
            )
    return root


PARSERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "tuple[str, ...]": lambda text: tuple(text.split(",")),
    "tuple[int, ...]": lambda text: tuple(map(int, text.split(","))),
}


def _options(kind: type[Any], args: argparse.Namespace) -> Any:
    return kind(**{each.name: getattr(args, each.name) for each in fields(kind)})


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


MEASUREMENTS: dict[str, tuple[Callable[[argparse.Namespace], Report | None], type[Any]]] = {
    "step": (step, StepOptions),
    "allreduce": (allreduce, AllreduceOptions),
    "memory": (memory, StepOptions),
    "train": (train, TrainOptions),
}

if __name__ == "__main__":
    # By its full name, so that spawned ranks can unpickle main().
    from dualdist.bench.ranks import worker

    raise SystemExit(worker.main())

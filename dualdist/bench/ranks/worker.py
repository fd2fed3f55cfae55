"""What every rank of a measurement runs: python -m dualdist.bench.ranks.worker step --model mlp ... --report FILE.

Rank 0 writes the report, as JSON, when all ranks are done; without --report it prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dualdist as dd
from dualdist import session
from dualdist.bench.cases import CONTENDERS, AllreduceOptions, StepOptions, TrainOptions
from dualdist.bench.ranks import allreduce_rounds, steps, training
from dualdist.diagnostics import recording
from dualdist.environments import detect
from dualdist.errors import DualdistError, UnsupportedError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one thing on this rank; the exit code."""
    args = parser().parse_args(argv)
    try:
        report = MEASURES[args.what](args)
    except DualdistError as error:
        print(f"dualdist bench: {error}", file=sys.stderr, flush=True)
        return 1
    if report is not None:
        write(report, args.report)
    return 0


def parser() -> argparse.ArgumentParser:
    """The words that follow `python -m dualdist.bench.ranks.worker`."""
    whole = argparse.ArgumentParser(prog="python -m dualdist.bench.ranks.worker")
    parts = whole.add_subparsers(dest="what", required=True)
    for name in MEASURES:
        add = parts.add_parser(name).add_argument
        add("--report", type=Path)
        add("--device", default="auto")
        add("--timeout-s", type=float, default=300.0)
        add("--rounds", type=int, default=15)
        add("--block-s", type=float, default=0.4)
        if name == "train":
            _train_words(add)
            continue
        if name == "allreduce":
            add("--sizes", required=True, type=lambda text: tuple(int(word) for word in text.split(",")))
            continue
        add("--model", required=True)
        add("--contenders", required=True, type=contenders)
        add("--batch", type=int, default=0)
        add("--image-size", type=int, default=0)
        add("--steps", type=int, default=0)
        add("--warmup", type=int, default=3)
    return whole


def _train_words(add: Any) -> None:
    add("--model", required=True)
    add("--contender", required=True, choices=tuple(CONTENDERS))
    add("--folder", type=Path, required=True)
    for name in ("batch", "warmup", "steps", "image-size", "seed"):
        add(f"--{name}", type=int, required=True)
    add("--slow", type=float, default=1.0)
    add("--sizes", type=lambda text: tuple(int(word) for word in text.split(",") if word), default=())


def contenders(text: str) -> tuple[str, ...]:
    """The names between the commas, all known."""
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or len(set(names)) < len(names):
        raise UsageError(f"contenders {text!r}: expected different ones of {', '.join(CONTENDERS)}")
    return names


def step(args: argparse.Namespace) -> dict[str, Any] | None:
    options = step_options(args)
    return _in_session(args, lambda: steps.measure(options), asdict(options))


def allreduce(args: argparse.Namespace) -> dict[str, Any] | None:
    options = AllreduceOptions(args.sizes, args.rounds, args.block_s, args.device, args.timeout_s)
    return _in_session(args, lambda: allreduce_rounds.measure(options), asdict(options))


def train(args: argparse.Namespace) -> dict[str, Any] | None:
    given = {name: getattr(args, name) for name in TrainOptions.__dataclass_fields__ if hasattr(args, name)}
    options, began = TrainOptions(**given), time.time()
    report = _in_session(args, lambda: training.train(options, args.folder, began) or {}, asdict(options))
    return report if options.sizes else None


def memory(args: argparse.Namespace) -> dict[str, Any] | None:
    """Peak memory of one contender alone; each rank leaves its own, as there may be no session to gather them by."""
    options = step_options(args)
    (name,) = options.contenders
    topology = detect(os.environ)
    backend = os.environ.get("DUALDIST_BACKEND", "")
    report = steps.memory(name, backend, options, topology, Path(f"{args.report}.store"))
    if args.report is not None:
        args.report = args.report.with_suffix(f".{topology.rank}.json")
    return report


def step_options(args: argparse.Namespace) -> StepOptions:
    given = {name: getattr(args, name) for name in StepOptions.__dataclass_fields__ if hasattr(args, name)}
    return StepOptions(**{name: value for name, value in given.items() if (name, value) != ("image_size", 0)})


def _in_session(args: argparse.Namespace, measure: Any, options: dict[str, Any]) -> dict[str, Any] | None:
    """The measurement between init() and shutdown(), with what it ran on; None on all ranks but the first."""
    dd.init(timeout_s=args.timeout_s)
    try:
        if args.device == "cuda" and dd.device().type != "cuda":
            raise UnsupportedError(
                "--device cuda, but torch sees no GPU here: leave it out, or hide no GPU from the ranks"
            )
        found = {**measure(), "options": options, **_place()}
        return found if dd.rank() == 0 else None
    finally:
        dd.shutdown()


def _place() -> dict[str, Any]:
    opened = session.current()
    return recording.describe_run(opened.topology, dd.backend(), dd.transport(), opened.device)


def write(report: dict[str, Any], path: Path | None) -> None:
    """The report is complete where it is looked for."""
    text = json.dumps(report)
    if path is None:
        print(text, flush=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


MEASURES = {"step": step, "allreduce": allreduce, "memory": memory, "train": train}

if __name__ == "__main__":
    raise SystemExit(main())

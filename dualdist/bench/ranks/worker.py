"""Program of a benchmark's ranks: python -m dualdist.bench.ranks.worker [--spawn=N] MEASUREMENT REPORT OPTIONS.

The options are a JSON object. Rank 0 writes the report as JSON when all ranks are done. With --spawn this process
starts the ranks, and does not import torch.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import dualdist as dd
from dualdist.bench.jobs import AllreduceOptions, StateOptions, StepOptions, TrainOptions
from dualdist.environments import detect
from dualdist.errors import DualdistError, UnsupportedError
from dualdist.launch.spawn import spawn_without_main
from dualdist.utils import accelerator
from dualdist.utils.output_file import write_atomically

# The options of each measurement, and its module and function; it imports torch, which a process that spawns does not.
MEASUREMENTS: dict[str, tuple[type[Any], str, str]] = {
    "step": (StepOptions, "measurements", "measure_steps"),
    "allreduce": (AllreduceOptions, "measurements", "measure_allreduces"),
    "sum": (AllreduceOptions, "measurements", "check_sum"),
    "memory": (StepOptions, "measurements", "measure_memory"),
    "train": (TrainOptions, "measurements", "train"),
    "state": (StateOptions, "state", "measure_state"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or run one measurement as one of them; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m dualdist.bench.ranks.worker")
    parser.add_argument("--spawn", type=int)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("report", type=Path)
    parser.add_argument("options", type=json.loads)
    args = parser.parse_args(argv)
    if args.spawn:
        return max(spawn_without_main(main, args.spawn, (argv[1:],)))  # --spawn=N is the first argument
    try:
        _measure(args.measurement, args.options, args.report)
    except DualdistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _measure(measurement: str, given: dict[str, Any], path: Path) -> None:
    """Measure in a session; rank 0 writes the report, if there is one."""
    from dualdist import session
    from dualdist.bench import recording

    start_time = time.time()
    options_class, module, function = MEASUREMENTS[measurement]
    options, measure = options_class(**given), getattr(import_module(f"dualdist.bench.ranks.{module}"), function)
    if measurement == "memory":  # opens a session only if it needs one, so that each rank writes a report
        topology, backend = detect(os.environ), os.environ.get("DUALDIST_BACKEND", "")
        report = measure(backend, options, topology, Path(f"{path}.store"))
        write_atomically(path.with_suffix(f".{topology.rank}.json"), json.dumps(report))
        return
    dd.init(timeout_s=options.timeout_s)
    try:
        if options.device in accelerator.KINDS and dd.device().type != options.device:
            raise UnsupportedError(
                f"--device {options.device}, but torch sees none here: leave it out, or hide no GPU from the ranks"
            )
        run = recording.describe_run(session.current())
        more = {"train": (path.parent, start_time), "state": (path.parent,)}.get(measurement, ())
        found = measure(options, *more)
        is_root = dd.rank() == 0
    finally:
        dd.shutdown()
    if found is not None and is_root:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**found, "options": asdict(options), **run}))


if __name__ == "__main__":
    # By its full name, so that spawned ranks can unpickle main().
    from dualdist.bench.ranks import worker

    raise SystemExit(worker.main())

"""`dualdist compare`: its options, its launches, and the report of which contender is the fastest."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualdist.backends import registry
from dualdist.bench.compare.matrix import BASELINES, DEFAULT_BASELINES
from dualdist.bench.options import IMAGE_SIZE, MODELS
from dualdist.bench.report import error_summary, format_command, make_record, print_report, write_json
from dualdist.cli.compare_request import (
    check_arguments,
    describe_conditions,
    describe_settings,
    make_settings,
    make_work,
    parse_budget,
    select_cells,
)
from dualdist.cli.help_formatter import set_completions
from dualdist.errors import UsageError
from dualdist.launch.execute import find_site
from dualdist.launch.launchers import LAUNCHERS
from dualdist.launch.processes import termination_raises

if TYPE_CHECKING:
    from dualdist.bench.compare.launches import Launch
    from dualdist.bench.compare.metrics import ComparisonResult
    from dualdist.bench.compare.runner import LaunchSchedule

ROUNDS, BUDGET = 9, "15m"
WARMUP = 3
EXAMPLES = (
    "dualdist compare",
    "dualdist compare -np 4 --model transformer --budget 20m --output report/",
    "dualdist compare --backends native,horovod --transports gloo,mpi",
    "dualdist compare --script train.py --save-choice -- --epochs 3",
)
COMMON = {
    "ranks": "number of ranks, on this host (default: 2)",
    "budget": f"start no round that would exceed it (default: {BUDGET})",
    "backends": "of native, horovod, mpi (default: all)",
    "transports": "of shm, gloo, mpi, nccl (default: all)",
    "launchers": "default: the one that fits each",
    "model": "resnet18, mlp, transformer, ...",
    "script": "your own program, instead of a model",
    "output": "write report.html, plots, tables and raw data",
    "save_choice": "make the fastest the choice of init('auto')",
    "dry_run": "print the command lines and exit",
}
INTERRUPTED = 130
EXCLUDED: Any = {"ranks": {"__all__": {"start", "sample"}}}  # thousands of parameters, for the equivalence check only
REQUIRED, REQUIRED_FOR_OUTPUT = ("pydantic", "rich", "scipy"), ("jinja2", "matplotlib")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this sub-command."""
    parser.usage = "dualdist compare [option ...] [--script train.py [-- argument ...]]"
    add = parser.add_argument
    add("-np", "--ranks", type=int, default=2, metavar="N", help="number of ranks, on this host (default: 2)")
    add(
        "--budget",
        default=BUDGET,
        metavar="T",
        help=f"start no round that would exceed it, as 120s, 10m (default: {BUDGET})",
    )
    add("--rounds", type=int, default=ROUNDS, metavar="N", help=f"launches of each cell, at most (default: {ROUNDS})")
    cells = parser.add_argument_group("contenders: every combination").add_argument
    cells("--backends", metavar="A,B", help=f"of {', '.join(registry.names())} (default: all)")
    cells("--transports", metavar="A,B", help="of shm, gloo, mpi, nccl (default: all of the backend)")
    cells("--launchers", metavar="A,B", help=f"of {', '.join(LAUNCHERS)} (default: the one that fits each)")
    cells(
        "--baselines",
        metavar="A,B",
        help=f"of {', '.join(BASELINES)}, or '' for none (default: {','.join(DEFAULT_BASELINES)})",
    )
    cells(
        "--self-check",
        type=float,
        metavar="PERCENT",
        help="also run the first contender again, and slowed by so much: does this machine show the difference?",
    )
    work = parser.add_argument_group("training").add_argument
    work("--model", default="resnet18", metavar="NAME", help=f"of {', '.join(MODELS)} (default: resnet18)")
    work("--batch", type=int, default=0, metavar="N", help="global batch size (default: the model's per rank)")
    work("--steps", type=int, default=0, metavar="N", help="timed steps per launch (default: the model's)")
    work("--warmup", type=int, default=WARMUP, metavar="N", help=f"steps before those (default: {WARMUP})")
    work("--image-size", type=int, default=IMAGE_SIZE, metavar="N", help=f"for the ResNets (default: {IMAGE_SIZE})")
    work("--seed", type=int, default=0, metavar="N", help="of parameters, data and the order of launches (default: 0)")
    work("--script", metavar="FILE", help="your own program that calls dd.wrap_optimizer, instead of a model")
    work("--as-horovod", action="store_true", help="the script imports horovod.torch: use dualdist.hvd instead")
    work("arguments", nargs="*", metavar="ARGUMENT", help="the script's arguments, after --")
    work("--threads", type=int, metavar="N", help="OMP_NUM_THREADS per rank (default: as dualdist run sets it)")
    work("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: the GPU if torch sees one")
    work("--env", action="append", default=[], metavar="NAME=VALUE", help="variable for every rank; repeatable")
    out = parser.add_argument_group("results").add_argument
    out("--output", metavar="DIR", help="write report.html, plots, tables and raw data; run again to resume")
    out("--json", metavar="FILE", help="also write JSON to FILE; - for JSON alone on standard output")
    out("--csv", metavar="FILE", help="write one line per launch")
    out("--save-choice", action="store_true", help='backend="auto" takes the fastest from now on, on a machine as this')
    out("--dry-run", action="store_true", help="print the command lines and exit")
    out("--timeout", type=float, default=600.0, metavar="S", help="limit of one launch in seconds (default: 600)")
    set_completions(parser, {"launchers": tuple(LAUNCHERS), "backends": registry.names(), "model": tuple(MODELS)})


def run(args: argparse.Namespace) -> int:
    """Launch the contenders in turn and report the fastest; return 1 if there is no valid comparison."""
    check_arguments(args)
    for name in (*REQUIRED, *(REQUIRED_FOR_OUTPUT if args.output is not None else ())):
        if find_spec(name) is None:
            raise UsageError(f"dualdist compare needs {name}: pip install 'dualdist[compare]'")
    from dualdist.bench.compare.metrics import summarize
    from dualdist.bench.compare.runner import Comparison, LaunchSchedule

    site, settings = find_site(), make_settings(args)
    cells, refused = select_cells(args, site, settings)
    with _output_folder(args) as folder:
        comparison = Comparison(make_work(args), settings, site, folder)
        done, budget_s = comparison.load_launches(cells), parse_budget(args.budget)
        schedule = LaunchSchedule(cells, comparison.launch, done, rounds=args.rounds, budget_s=budget_s, seed=args.seed)
        if args.dry_run:
            for each in refused:
                print(f"dualdist compare: not {each.cell.label}: {error_summary(each.reason)}", file=sys.stderr)
            for number in range(args.rounds):
                for cell in schedule.remaining_in(number):
                    print(comparison.plan_job(cell, number).command_line)
            return 0
        labels = {cell.key: cell.label for cell in cells}
        launches, code = _launch_all(schedule, labels, done)
        result = summarize(cells, refused, launches, schedule.ended)
        status = _report(args, result, launches, labels, folder)
        return code or status


def _launch_all(schedule: LaunchSchedule, labels: dict[str, str], done: list[Launch]) -> tuple[list[Launch], int]:
    """Return all launches, also after an interrupt, and the exit status."""
    from dualdist.bench.compare.runner import show_progress

    launches, label = list(done), "resumed" if done else "started"
    try:
        with termination_raises(), show_progress() as show:
            show(label, len(launches), len(launches) + len(schedule.remaining), schedule.remaining_s())
            for launch in schedule:
                launches.append(launch)
                label = f"round {launch.round + 1}, {labels[launch.cell]}{' FAILED' if launch.error else ''}"
                show(label, len(launches), len(launches) + len(schedule.remaining), schedule.remaining_s())
    except KeyboardInterrupt:
        return launches, INTERRUPTED
    except SystemExit as end:
        return launches, int(end.code or 0)
    return launches, 0


def _report(
    args: argparse.Namespace, result: ComparisonResult, launches: list[Launch], labels: dict[str, str], folder: Path
) -> int:
    """Print and write the result; return 1 if the comparison is not valid."""
    from dualdist.bench.compare import output

    jobs = [launch.model_dump(exclude=EXCLUDED) for launch in launches]
    record = make_record("compare", format_command(sys.argv[1:]), describe_settings(args), jobs, asdict(result))
    if args.json != "-":
        print_report(record, list(output.tables(result)), sys.stdout)
        print(f"\nmachine   {result.noise}\nlaunches  {result.launches}, {result.ended}")
        if result.equivalence.launches:
            print(f"training  {result.equivalence}")
        for sentence in result.pairwise.values():
            print(f"          {sentence}")
        print(f"verdict   {result.verdict.sentence}", flush=True)
    if args.json is not None:
        write_json(record, args.json)
    if args.csv is not None:
        output.write_csv(Path(args.csv), launches, labels)
    if args.output is not None:
        page = output.write_folder(folder, result, record, launches, labels)
        print(f"page      {page}", file=sys.stderr if args.json == "-" else sys.stdout)
    is_valid = result.verdict.kind not in ("invalid", "nothing")
    if args.save_choice and is_valid:
        _save_choices(result, launches, record["timestamp"])
    elif args.save_choice:
        print("dualdist compare: nothing saved: the comparison is not valid", file=sys.stderr)
    return 0 if is_valid else 1


def _save_choices(result: ComparisonResult, launches: list[Launch], timestamp: str) -> None:
    """Save the fastest contenders to the user's configuration, and print them to standard error."""
    from dualdist.bench.compare.launches import group_by_cell
    from dualdist.bench.compare.verdict import choices_to_save
    from dualdist.rendezvous import backend_selection

    by_key, path = group_by_cell(launches), backend_selection.choices_path(os.environ)
    contenders = {cell.label: by_key[cell.key] for cell in result.cells if cell.is_contender}
    found = list(choices_to_save(contenders, timestamp))
    choices = [each for each in found if isinstance(each, backend_selection.SavedChoice)]
    if choices:
        backend_selection.save_choices(path, choices)
    for each in found:
        line = each if isinstance(each, str) else f"saved {each.backend} over {each.transport} for {each.conditions}"
        print(f"dualdist compare: {line}", file=sys.stderr)
    if choices:
        print(f"dualdist compare: in {path}", file=sys.stderr)


@contextmanager
def _output_folder(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder for launches: --output, which a dry run does not change, or a temporary one."""
    from dualdist.bench.compare.launches import check_folder, claim_folder
    from dualdist.bench.compare.runner import RUNNING

    if args.output is None:
        with tempfile.TemporaryDirectory(prefix="dualdist-compare-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder, conditions = Path(args.output).resolve(), describe_conditions(args)
    if args.dry_run:
        check_folder(folder, conditions)
        yield folder
        return
    with claim_folder(folder, conditions):
        try:
            yield folder
        finally:
            shutil.rmtree(folder / RUNNING, ignore_errors=True)

"""`dualdist compare`: its options, and the way from them to launches and a verdict."""

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

from dualdist.bench.cases import IMAGE_SIZE, MODELS
from dualdist.bench.compare.matrix import BASELINES, DEFAULT_BASELINES, Cell
from dualdist.bench.compare.runner import RUNNING, claimed, looked_at
from dualdist.bench.jobs import MeasurementSettings
from dualdist.bench.report import last_words, record, show, typed, write_json
from dualdist.cli.compare_request import cells_of, check, conditions_of, seconds, setting_of, settings_of, work_of
from dualdist.cli.help_formatter import set_completions
from dualdist.errors import UsageError
from dualdist.launch.execute import find_site
from dualdist.launch.job import BACKEND_TRANSPORTS
from dualdist.launch.launchers import LAUNCHERS, Site
from dualdist.launch.processes import termination_raises

if TYPE_CHECKING:
    from dualdist.bench.compare.figures import ComparisonResult
    from dualdist.bench.compare.launches import Launch
    from dualdist.bench.compare.runner import Comparison
    from dualdist.bench.compare.schedule import LaunchSchedule

ROUNDS, BUDGET = 9, "15m"
WARMUP = 3
EXAMPLES = (
    "dualdist compare",
    "dualdist compare -np 4 --model transformer --budget 20m --output report/",
    "dualdist compare --backends native,horovod --transports gloo,mpi",
    "dualdist compare --script train.py --save-choice -- --epochs 3",
)
COMMON = {
    "ranks": "how many ranks, on this host (default: 2)",
    "budget": f"start no round that would end later (default: {BUDGET})",
    "backends": "of native, horovod, mpi (default: all)",
    "transports": "of shm, gloo, mpi, nccl (default: all)",
    "launchers": "default: the one that fits each",
    "model": "resnet18, mlp, transformer, ...",
    "script": "your own program, instead of a model",
    "output": "write report.html, plots, tables and raw data",
    "save_choice": "the fastest becomes what init('auto') takes",
    "dry_run": "print the command lines and do nothing",
}
INTERRUPTED = 130
UNTOLD: Any = {"ranks": {"__all__": {"start", "sample"}}}  # thousands of parameters, which only the verification reads
NEEDED = ("pydantic", "jinja2", "matplotlib")  # the last ones for --output


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of this sub-command."""
    parser.usage = "dualdist compare [option ...] [--script train.py [-- argument ...]]"
    add = parser.add_argument
    add("-np", "--ranks", type=int, default=2, metavar="N", help="how many ranks, on this host (default: 2)")
    add(
        "--budget",
        default=BUDGET,
        metavar="T",
        help=f"start no round that would end later, as 120s, 10m (default: {BUDGET})",
    )
    add(
        "--rounds", type=int, default=ROUNDS, metavar="N", help=f"launch everything N times at most (default: {ROUNDS})"
    )
    cells = parser.add_argument_group("contenders: every combination").add_argument
    cells("--backends", metavar="A,B", help=f"of {', '.join(BACKEND_TRANSPORTS)} (default: all)")
    cells("--transports", metavar="A,B", help="of shm, gloo, mpi, nccl (default: all that the backend has)")
    cells("--launchers", metavar="A,B", help=f"of {', '.join(LAUNCHERS)} (default: the one that fits each)")
    cells(
        "--baselines",
        metavar="A,B",
        help=f"of {', '.join(BASELINES)}, or an empty word (default: {','.join(DEFAULT_BASELINES)})",
    )
    cells(
        "--self-check",
        type=float,
        metavar="PERCENT",
        help="also run the first contender a second time, and a third time slowed by so much: are both seen here?",
    )
    work = parser.add_argument_group("what they train").add_argument
    work("--model", default="resnet18", metavar="NAME", help=f"of {', '.join(MODELS)} (default: resnet18)")
    work("--batch", type=int, default=0, metavar="N", help="of all ranks together (default: the model's own for each)")
    work("--steps", type=int, default=0, metavar="N", help="that each launch times (default: what fits the model)")
    work("--warmup", type=int, default=WARMUP, metavar="N", help=f"steps before those (default: {WARMUP})")
    work("--image-size", type=int, default=IMAGE_SIZE, metavar="N", help=f"for the ResNets (default: {IMAGE_SIZE})")
    work("--seed", type=int, default=0, metavar="N", help="of parameters, data and the order of launches (default: 0)")
    work("--script", metavar="FILE", help="your own program that calls dd.wrap_optimizer, instead of a model")
    work("--as-horovod", action="store_true", help="the script was written for Horovod: it finds dualdist.hvd instead")
    work("arguments", nargs="*", metavar="ARGUMENT", help="the script's own arguments, after --")
    work("--threads", type=int, metavar="N", help="OMP_NUM_THREADS of each rank (default: as dualdist run gives it)")
    work("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: the GPU where torch sees one")
    work("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every rank; again for more")
    out = parser.add_argument_group("results").add_argument
    out("--output", metavar="DIR", help="write report.html, plots, tables and all raw data; a second run goes on there")
    out("--json", metavar="FILE", help="write JSON to FILE as well, or to standard output alone for -")
    out("--csv", metavar="FILE", help="write one line for each launch")
    out("--save-choice", action="store_true", help='backend="auto" takes the fastest from now on, where all is as here')
    out("--dry-run", action="store_true", help="print the command lines and do nothing")
    set_completions(
        parser, {"launchers": tuple(LAUNCHERS), "backends": tuple(BACKEND_TRANSPORTS), "model": tuple(MODELS)}
    )
    out("--timeout", type=float, default=600.0, metavar="S", help="seconds that one launch may take (default: 600)")


def run(args: argparse.Namespace) -> int:
    """Launch the contenders in turn, and say which is the fastest. 1 where that cannot be said."""
    check(args)
    for name in NEEDED if args.output is not None else NEEDED[:1]:
        if find_spec(name) is None:
            raise UsageError(f"dualdist compare needs {name}: pip install 'dualdist[compare]'")
    from dualdist.bench.compare.figures import result

    site, setting = find_site(), setting_of(args)
    cells, refused = cells_of(args, site, setting)
    with _folder(args) as folder:
        contest = _contest(args, setting, site, folder)
        kept = contest.kept(cells)
        rounds = _rounds(args, contest, cells, kept)
        if args.dry_run:
            for each in refused:
                print(f"dualdist compare: not {each.cell.label}: {last_words(each.reason)}", file=sys.stderr)
            for number in range(args.rounds):
                for cell in rounds.left_in(number):
                    print(contest.planned(cell, number).command_line)
            return 0
        launches, code = _launched(rounds, cells, kept)
        found = result(cells, refused, launches, rounds.ended)
        verdict = _report(args, found, launches, {cell.key: cell.label for cell in cells}, folder)
        return code or verdict


def _launched(rounds: LaunchSchedule, cells: list[Cell], kept: list[Launch]) -> tuple[list[Launch], int]:
    """All launches, also where they were interrupted, and the exit code that says so."""
    from dualdist.bench.compare.schedule import progress

    launches, labels = list(kept), {cell.key: cell.label for cell in cells}
    try:
        with termination_raises(), progress() as tell:
            begun = "from the run before" if kept else "begun"
            tell(begun, len(launches), len(launches) + len(rounds.left), rounds.left_s())
            for launch in rounds:
                launches.append(launch)
                total = len(launches) + len(rounds.left)
                failed = "" if launch.error is None else " FAILED"
                tell(f"round {launch.round + 1}, {labels[launch.cell]}{failed}", len(launches), total, rounds.left_s())
    except KeyboardInterrupt:
        return launches, INTERRUPTED
    except SystemExit as end:
        return launches, int(end.code or 0)
    return launches, 0


def _report(
    args: argparse.Namespace, found: ComparisonResult, launches: list[Launch], labels: dict[str, str], folder: Path
) -> int:
    """Show and write what was found; 1 where there is no valid comparison."""
    from dualdist.bench.compare.tables import tables, write_csv

    jobs = [launch.model_dump(exclude=UNTOLD) for launch in launches]
    kept = record("compare", typed(sys.argv[1:]), settings_of(args), jobs, asdict(found))
    if args.json != "-":
        show(kept, list(tables(found)), sys.stdout)
        print(f"\nmachine   {found.noise}\nlaunches  {found.launches}, {found.ended}")
        if found.same.launches:
            print(f"same      {found.same}")
        for sentence in found.further.values():
            print(f"          {sentence}")
        print(f"verdict   {found.verdict.sentence}", flush=True)
    if args.json is not None:
        write_json(kept, args.json)
    if args.csv is not None:
        write_csv(Path(args.csv), launches, labels)
    if args.output is not None:
        from dualdist.bench.compare import page

        where = page.write(folder, found, kept, launches, labels)
        print(f"page      {where}", file=sys.stderr if args.json == "-" else sys.stdout)
    is_valid = found.verdict.kind not in ("invalid", "nothing")
    if args.save_choice and is_valid:
        _save(found, launches, kept["at"])
    elif args.save_choice:
        print("dualdist compare: nothing saved: this was no valid comparison", file=sys.stderr)
    return 0 if is_valid else 1


def _save(found: ComparisonResult, launches: list[Launch], at: str) -> None:
    """The user's configuration has the choices that follow from this, and standard error says which."""
    from dualdist.bench.compare.launches import by_cell
    from dualdist.bench.compare.verdict import chosen
    from dualdist.rendezvous import saved_choice

    by_key, path = by_cell(launches), saved_choice.choices_path(os.environ)
    contenders = {cell.label: by_key[cell.key] for cell in found.cells if cell.is_contender}
    told = list(chosen(contenders, at))
    fresh = [each for each in told if isinstance(each, saved_choice.SavedChoice)]
    if fresh:
        saved_choice.save(path, fresh)
    for each in told:
        said = each if isinstance(each, str) else f"saved {each.backend} over {each.transport} for {each.conditions}"
        print(f"dualdist compare: {said}", file=sys.stderr)
    if fresh:
        print(f"dualdist compare: in {path}", file=sys.stderr)


def _rounds(args: argparse.Namespace, contest: Comparison, cells: list[Cell], kept: list[Launch]) -> LaunchSchedule:
    from dualdist.bench.compare.schedule import LaunchSchedule, ScheduleLimits

    return LaunchSchedule(
        cells, ScheduleLimits(args.rounds, seconds(args.budget)), contest.launch, kept, seed=args.seed
    )


@contextmanager
def _folder(args: argparse.Namespace) -> Iterator[Path]:
    """Where launches are kept: in the output, which a dry run leaves as it is, or only until the end."""
    if args.output is not None:
        folder = Path(args.output).resolve()
        if args.dry_run:
            looked_at(folder, conditions_of(args))
            yield folder
            return
        with claimed(folder, conditions_of(args)):
            try:
                yield folder
            finally:
                shutil.rmtree(folder / RUNNING, ignore_errors=True)
        return
    with tempfile.TemporaryDirectory(prefix="dualdist-compare-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def _contest(args: argparse.Namespace, setting: MeasurementSettings, site: Site, folder: Path) -> Comparison:
    from dualdist.bench.compare.runner import Comparison

    return Comparison(work_of(args), setting, site, folder)

"""`dualdist bench`: the options of its measurements, the jobs that they launch, and what is printed in the end."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualdist.bench import allreduce as bench_allreduce
from dualdist.bench import scale as bench_scale
from dualdist.bench import startup as bench_startup
from dualdist.bench import step as bench_step
from dualdist.bench.cases import CONTENDERS, IMAGE_SIZE, MODELS, AllreduceOptions, StepOptions, sizes_up_to
from dualdist.bench.compare.matrix import MatrixFacts, refusal_reason
from dualdist.bench.jobs import CHOICES, MeasurementSettings, PlannedJob, RunConfig, parse_configs, run_job
from dualdist.bench.report import FigureTable, check_file, last_words, record, show, typed, write_json
from dualdist.bench.scale import LinkModel, ScaleOptions
from dualdist.cli.compare_request import gpus_of
from dualdist.cli.help_formatter import add_help, add_list, set_completions
from dualdist.doctor import installed_backends
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.env_defaults import SLURM_JOB
from dualdist.launch.execute import find_site
from dualdist.launch.job import BACKEND_TRANSPORTS
from dualdist.launch.processes import termination_raises
from dualdist.utils.redaction import redact_command
from dualdist.utils.suggest import require_choice

WHATS = {
    "step": "one training step beside DDP and raw Horovod",
    "allreduce": "latency and bandwidth beside the raw library",
    "startup": "from import to a first collective",
    "scale": "a fitted model, and what it predicts for many ranks",
}
EVERY = {
    "ranks": "how many ranks, on this host",
    "backend": "as native,horovod:mpi (default: all usable)",
    "rounds": "how often the contenders take turns",
    "env": "a variable for every rank; again for more",
    "json": "write JSON to FILE as well, or - for stdout alone",
    "dry_run": "print the command lines and do nothing",
}
# Of each part, the usual options and examples.
HELP: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "step": (
        {"model": "resnet18, mlp, ...; again for more", "launches": "start the whole job so often", **EVERY},
        (
            "dualdist bench step --model resnet18 --launches 5",
            "dualdist bench step --backend native:shm,native:gloo,mpi",
        ),
    ),
    "allreduce": (
        {"sizes": "these sizes in bytes alone, as 8,64K,25M", "max_bytes": "the largest tensor", **EVERY},
        ("dualdist bench allreduce --backend native,horovod:mpi",),
    ),
    "startup": (EVERY, ("dualdist bench startup -np 8", "dualdist bench startup --ranks 1,2,4,8")),
    "scale": (
        {"model": "whose step is measured on one rank", "measure_up_to": "launch no more ranks than these"}
        | EVERY
        | {"backend": "one, as horovod:mpi (default: native)"},
        ("dualdist bench scale --ranks 2,4,8,64,512",),
    ),
}


RANKS = "2,4,8,16,32,64,128,256,512,1024,2048,4096"
INTERRUPTED = 130
Done = list[tuple[PlannedJob, list[dict[str, Any]]]]
Failed = list[tuple[PlannedJob, str]]  # and why


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of this sub-command."""
    add_list(parser, WHATS, tuple(example for _, examples in HELP.values() for example in examples[:1]))
    parts = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    step = _part(parts, "step")
    add = step.add_argument
    add(
        "--model",
        action="append",
        metavar="NAME",
        help=f"of {', '.join(MODELS)}; again for more (default: the first 3)",
    )
    add("--full", action="store_true", help="all models, ResNet-50 and a transformer of 126M parameters too")
    add("--contenders", metavar="A,B,...", help=f"of {', '.join(CONTENDERS)} (default: what fits the backend)")
    add("--steps", type=int, default=0, metavar="N", help="steps in a timing (default: as many as fill --block-s)")
    add("--warmup", type=int, default=3, metavar="N", help="rounds of one step that are not counted (default: 3)")
    add("--batch", type=int, default=0, metavar="N", help="of each rank (default: the model's own)")
    add("--image-size", type=int, default=IMAGE_SIZE, metavar="N", help=f"for the ResNets (default: {IMAGE_SIZE})")
    add("--block-s", type=float, default=0.4, metavar="S", help="seconds that a timing should take (default: 0.4)")
    add("--no-memory", action="store_true", help="leave out the jobs of one contender that measure peak memory")
    allreduce = _part(parts, "allreduce")
    add = allreduce.add_argument
    add("--max-bytes", type=_size, default=256 << 20, metavar="N", help="the largest tensor, as 25M (default: 256M)")
    add("--sizes", metavar="N,N,...", help="these sizes in bytes alone, as 8,64K,25M")
    add("--block-s", type=float, default=0.03, metavar="S", help="seconds that a timing should take (default: 0.03)")
    startup = _part(parts, "startup", rounds=7)
    scale = _part(parts, "scale", rounds=7)
    add = scale.add_argument
    add("--measure-up-to", type=int, default=8, metavar="N", help="launch no more ranks than these (default: 8)")
    add("--max-bytes", type=_size, default=16 << 20, metavar="N", help="the sweep's largest tensor (default: 16M)")
    add("--sizes", metavar="N,N,...", help="the sweep's sizes, as 8,64K,4M")
    add("--block-s", type=float, default=0.03, metavar="S", help="seconds that a timing should take (default: 0.03)")
    add("--alpha-us", type=float, metavar="US", help="the time to begin a message, with --beta-gb-s instead of a sweep")
    add("--beta-gb-s", type=float, metavar="GB/S", help="the bandwidth of one link, each way")
    add("--model", default="resnet18", metavar="NAME", help="whose step is measured on one rank (default: resnet18)")
    add("--compute-ms", type=float, metavar="MS", help="a step without communication, with --bytes instead of a model")
    add("--bytes", type=_size, metavar="N", help="the gradients of that step, as 100M")
    for name, part in (("step", step), ("allreduce", allreduce), ("startup", startup), ("scale", scale)):
        add_help(part, *HELP[name])
        set_completions(part, {"launcher": CHOICES, "model": tuple(MODELS)})


def _part(parts: Any, name: str, rounds: int = 15) -> argparse.ArgumentParser:
    summary = WHATS[name]
    part: argparse.ArgumentParser = parts.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", add_help=False
    )
    add = part.add_argument
    if name == "scale":
        add("--ranks", default=RANKS, metavar="N,N,...", help=f"for which numbers of ranks (default: {RANKS})")
    elif name == "startup":
        add("-np", "--ranks", default="2", metavar="N,N,...", help="how many ranks, on this host (default: 2)")
    else:
        add("-np", "--ranks", type=int, default=2, metavar="N", help="how many ranks, on this host (default: 2)")
    add(
        "--backend",
        default=None,
        metavar="B[:T],...",
        help="one backend, with a transport if need be: horovod:mpi (default: native)"
        if name == "scale"
        else "backends, each a job of its own, with a transport if need be: native,horovod:mpi (default: all usable)",
    )
    add("--transport", metavar="T", help="for the backends that are named without one")
    add("--launcher", metavar="L", help=f"of {', '.join(CHOICES)} (default: mpirun for MPI, else torchrun)")
    add(
        "--rounds",
        type=int,
        default=rounds,
        metavar="N",
        help=f"how often the contenders take turns (default: {rounds})",
    )
    add("--launches", type=int, default=1, metavar="N", help="how often the whole job is started anew (default: 1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: the GPU where torch sees one")
    add("--threads", type=int, default=1, metavar="N", help="OMP_NUM_THREADS of each rank (default: 1)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for every rank; again for more")
    add("--timeout", type=float, default=1800.0, metavar="S", help="seconds that one job may take (default: 1800)")
    add("--keep", metavar="DIR", help="leave what the ranks reported in this folder")
    add("--json", metavar="FILE", help="write JSON to FILE as well, or to standard output alone for -")
    add("--dry-run", action="store_true", help="print the command lines and do nothing")
    return part


def run(args: argparse.Namespace) -> int:
    """Launch the jobs, and print or write what they found; 1 where a job failed, 130 after Ctrl-C."""
    check_file("--json", args.json)
    for name in ("rounds", "launches"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: expected 1 or more")
    with _folder(args.keep, is_dry=args.dry_run) as folder:
        jobs, judge, tables = BENCHES[args.what](args, folder)
        if args.dry_run:
            for planned in jobs:
                print(planned.command_line)
            return 0
        done, failed, code = _launched(jobs, args.timeout)
    results = judge(done)
    told = [_job(planned, reports) for planned, reports in done]
    told += [{**_job(planned, []), "error": error} for planned, error in failed]
    kept = record(args.what, typed(sys.argv[1:]), _settings(args), told, results)
    if args.json is not None:
        write_json(kept, args.json)
    if args.json != "-":
        show(kept, [*tables(results), *_missing(failed)], sys.stdout)
    return code


Bench = tuple[list[PlannedJob], Callable[[Done], Any], Callable[[Any], Any]]


def _step(args: argparse.Namespace, folder: Path) -> Bench:
    chosen = tuple(args.contenders.split(",")) if args.contenders else ()
    names = args.model or [name for name, model in MODELS.items() if args.full or not model.full]
    for name in names:
        require_choice(name, MODELS, "model")
    least = {"batch": 0, "steps": 0, "warmup": 1, "image_size": 32}
    for option, value in least.items():
        if getattr(args, option) < value:
            raise UsageError(f"--{option.replace('_', '-')} {getattr(args, option)}: expected {value} or more")
    shared = {name: getattr(args, name) for name in ("rounds", "steps", "block_s", "warmup", "batch", "image_size")}
    options = [StepOptions(name, chosen, **shared) for name in names]
    setting = _setting(args)
    where = _places(args, setting, args.launcher)
    jobs = bench_step.plan(
        where, options, setting, find_site(), folder, launches=args.launches, with_memory=not args.no_memory
    )
    return list(jobs), bench_step.judge, bench_step.tables


def _allreduce(args: argparse.Namespace, folder: Path) -> Bench:
    options = AllreduceOptions(_sizes(args), args.rounds, args.block_s)
    setting = _setting(args)
    where = _places(args, setting, args.launcher)
    jobs = bench_allreduce.plan(where, options, setting, find_site(), folder, launches=args.launches)
    return list(jobs), bench_allreduce.judge, bench_allreduce.tables


def _startup(args: argparse.Namespace, folder: Path) -> Bench:
    if args.launches != 1:
        raise UsageError("bench startup launches every job anew anyway: say --rounds, not --launches")
    settings = [_setting(args, ranks=ranks) for ranks in _numbers(args.ranks)]
    found = _places(args, settings[-1], None)
    where = bench_startup.where_raw_starts(found, launcher_was_named=args.launcher is not None)
    jobs = bench_startup.plan(where, settings, find_site(), folder, rounds=args.rounds)
    return list(jobs), bench_startup.judge, bench_startup.tables


def _scale(args: argparse.Namespace, folder: Path) -> Bench:
    if args.launches != 1:
        raise UsageError("bench scale takes no --launches: say --rounds")
    require_choice(args.model, MODELS, "model")
    if args.compute_ms is not None and not 0 < args.compute_ms < math.inf:
        raise UsageError(f"--compute-ms {args.compute_ms:g}: expected a time above 0")
    options = ScaleOptions(
        _numbers(args.ranks),
        args.measure_up_to,
        args.model,
        _link(args),
        None if args.compute_ms is None else args.compute_ms / 1e3,
        args.bytes,
    )
    where = parse_configs(args.backend or "native", args.transport, args.launcher)
    if len(where) != 1:
        raise UsageError(f"backends {args.backend!r}: bench scale fits one backend at a time")
    sweep, setting = AllreduceOptions(_sizes(args), args.rounds, args.block_s), _setting(args, ranks=1)
    if len(sweep.sizes) < 2:
        raise UsageError("bench scale needs two sizes or more to tell latency from bandwidth")
    jobs = bench_scale.plan(where[0], options, sweep, setting, find_site(), folder)
    return list(jobs), lambda done: bench_scale.judge(done, options), bench_scale.tables


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--ranks {text}: expected whole numbers with commas between, as 2,4,8")
    return tuple(sorted({int(word) for word in words}))


def _link(args: argparse.Namespace) -> LinkModel | None:
    given = (args.alpha_us, args.beta_gb_s)
    if given == (None, None):
        return None
    if None in given or not (0 <= args.alpha_us < math.inf and 0 < args.beta_gb_s < math.inf):
        raise UsageError("--alpha-us and --beta-gb-s describe one link together: give both, as 2.5 and 12")
    return LinkModel(args.alpha_us / 1e6, 1 / (args.beta_gb_s * 1e9))


def _sizes(args: argparse.Namespace) -> tuple[int, ...]:
    if args.sizes is None:
        return sizes_up_to(args.max_bytes)
    try:
        return tuple(sorted({_size(word) for word in args.sizes.split(",")}))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--sizes {args.sizes}: {error}") from error


BENCHES: dict[str, Callable[[argparse.Namespace, Path], Bench]] = {
    "step": _step,
    "allreduce": _allreduce,
    "startup": _startup,
    "scale": _scale,
}


def _setting(args: argparse.Namespace, ranks: int | None = None) -> MeasurementSettings:
    for word in args.env:
        if not word.partition("=")[1]:
            raise UsageError(f"--env {word}: expected NAME=VALUE")
    variables = {word.partition("=")[0]: word.partition("=")[2] for word in args.env}
    return MeasurementSettings(
        args.ranks if ranks is None else ranks,
        args.threads,
        args.device,
        args.timeout,
        min(300.0, args.timeout),
        variables,
    )


def _places(args: argparse.Namespace, setting: MeasurementSettings, launcher: str | None) -> list[RunConfig]:
    """Those of the backends that were named, else of all that can run here."""
    if args.backend is not None:
        return parse_configs(args.backend, args.transport, launcher)
    site, found = find_site(), parse_configs(",".join(BACKEND_TRANSPORTS), args.transport, launcher)
    gpus = 0 if args.device == "cpu" else gpus_of(site)
    facts = MatrixFacts(gpus, args.device, installed_backends(), is_in_slurm=SLURM_JOB in os.environ)
    reasons = {place: refusal_reason(place, setting, site, facts) for place in found}
    # raw mpi4py, beside which the backend is measured, moves CPU tensors only.
    usable = [place for place in found if reasons[place] is None and not (place.backend == "mpi" and gpus)]
    if not usable:
        raise UsageError(f"no backend can run here: {'; '.join(filter(None, reasons.values()))}")
    return usable


def _launched(jobs: list[PlannedJob], timeout_s: float) -> tuple[Done, Failed, int]:
    """What was measured, what was not and why, and the exit code. What failed once is not launched again."""
    done: Done = []
    failed: Failed = []
    try:
        with termination_raises():
            for number, planned in enumerate(jobs, 1):
                if any(_is_again(planned, other) for other, _ in failed):
                    failed.append((planned, "it failed before, and was not launched again"))
                    continue
                print(f"[{number}/{len(jobs)}] {planned.title}", file=sys.stderr, flush=True)
                try:
                    done.append((planned, run_job(planned, timeout_s)))
                except LaunchError as error:
                    failed.append((planned, str(error)))
                    print(f"dualdist bench: {error}", file=sys.stderr, flush=True)
    except (KeyboardInterrupt, SystemExit) as end:
        code = INTERRUPTED if isinstance(end, KeyboardInterrupt) else int(end.code or 0)
        rest = jobs[len(done) + len(failed) :]
        return done, [*failed, *((planned, "interrupted") for planned in rest)], code
    return done, failed, 1 if failed else 0


def _is_again(planned: PlannedJob, other: PlannedJob) -> bool:
    """Whether both are the same but for the number of the launch."""
    return {**planned.tags, "launch": 0} == {**other.tags, "launch": 0}


def _missing(failed: Failed) -> Iterator[FigureTable]:
    if failed:
        rows = tuple((planned.title, last_words(error)) for planned, error in failed)
        yield FigureTable("Missing", ("job", "why"), rows, words=2)


def _job(planned: PlannedJob, reports: list[dict[str, Any]]) -> dict[str, Any]:
    return {"what": planned.title, "command": planned.command_line, "reports": reports}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("ranks", "threads", "device", "rounds", "launches")
    return {**{name: getattr(args, name) for name in names}, "env": redact_command(args.env)}


@contextmanager
def _folder(keep: str | None, *, is_dry: bool) -> Iterator[Path]:
    """Where the ranks leave their reports: new, so that no old one is taken for theirs. A dry run makes none."""
    if keep is not None:
        folder = Path(keep).resolve()
        try:
            if not is_dry:
                folder.mkdir(parents=True, exist_ok=True)
            is_empty = not folder.exists() or not any(folder.iterdir())
        except OSError as error:
            raise UsageError(f"--keep {keep}: cannot be used ({error.strerror}); name a new or empty folder") from error
        if not is_empty:
            raise UsageError(f"--keep {keep}: expected a new or empty folder, and something is in it")
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="dualdist-bench-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def _size(text: str) -> int:
    """Bytes: 8, 64K, 25M, 1G."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdecimal() or int(digits) * scale < 4:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size of 4 bytes or more, as 8, 64K or 25M")
    return int(digits) * scale

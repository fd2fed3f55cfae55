"""`dualdist bench`: the options of its benchmarks, the launch of their jobs, and the printed report."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.bench import allreduce as bench_allreduce
from dualdist.bench import startup as bench_startup
from dualdist.bench import state as bench_state
from dualdist.bench import step as bench_step
from dualdist.bench.jobs import (
    DEFAULT_MODELS,
    DTYPES,
    IMAGE_SIZE,
    METHODS,
    MODELS,
    OPTIMIZERS,
    AllreduceOptions,
    Done,
    MeasurementSettings,
    PlannedJob,
    RunConfig,
    StateOptions,
    StepOptions,
    parse_configs,
    plan_launches,
    refusal_reasons,
    run_job,
)
from dualdist.bench.placement import HERE
from dualdist.bench.ranks.cold_start import RAW_LIBRARIES
from dualdist.bench.report import dump_json, failure_table, format_command, make_record, print_report
from dualdist.bench.slow_link import LAUNCHER, require_slow_link
from dualdist.cli.compare import (
    INTERRUPTED,
    add_host_options,
    check_minimum,
    describe_placement,
    find_facts,
    make_settings,
    place_ranks,
    probe_placement,
)
from dualdist.cli.help_formatter import add_help, add_list, set_completions
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.execute import find_site
from dualdist.launch.launchers import DEFAULT_LAUNCHER, LAUNCHERS
from dualdist.launch.launchers.srun import SRUN
from dualdist.launch.processes import termination_raises
from dualdist.utils.accelerator import KINDS
from dualdist.utils.output_file import check_writable, write_json
from dualdist.utils.redaction import redact_command
from dualdist.utils.suggest import require_choice

BENCHMARKS = {
    "step": "training step time, against DDP and raw Horovod",
    "allreduce": "allreduce latency and bandwidth, against other libraries",
    "startup": "time from import to the first collective",
    "state": "broadcast, save and load of a large model",
}
ON_HOSTS = ("step", "allreduce")  # the benchmarks of several hosts
SHARED = ("ranks", "backend", "rounds", "env", "json", "dry_run")
# The usual options of each benchmark, and examples.
HELP: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "step": (
        ("model", "launches", "hosts", "slow_link", *SHARED),
        (
            "dualdist bench step --model resnet18 --launches 5",
            "dualdist bench step --slow-link 1gbit -np 4",
            "dualdist bench step --backend native:shm,native:gloo,mpi",
        ),
    ),
    "allreduce": (
        ("sizes", "max_bytes", "dtype", "hosts", "slow_link", *SHARED),
        ("dualdist bench allreduce --backend native,horovod:mpi",),
    ),
    "startup": (SHARED, ("dualdist bench startup -np 8", "dualdist bench startup --ranks 1,2,4,8")),
    "state": (("bytes", "launches", *SHARED), ("dualdist bench state --bytes 800M",)),
}
Failed = list[tuple[PlannedJob, str]]  # each job with its error
# Jobs, the summary of their reports, and the tables of that.
Benchmark = tuple[Iterable[PlannedJob], Callable[[Done], Any], Callable[[Any], Any]]
Builder = Callable[[argparse.Namespace, Path], Benchmark]


def configure(parser: argparse.ArgumentParser) -> None:
    add_list(parser, BENCHMARKS, tuple(example for _, examples in HELP.values() for example in examples[:1]))
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    add = _add_benchmark(commands, "step", _step)
    model_help = f"may be repeated (default: {', '.join(DEFAULT_MODELS)})"
    add("--model", action="append", choices=MODELS, metavar="NAME", help=model_help)
    add("--contenders", metavar="A,B,...", help=f"some of {', '.join(METHODS)} (default: depends on the backend)")
    add("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0], help=f"default: {OPTIMIZERS[0]}, with momentum")
    add("--steps", type=int, default=0, metavar="N", help="steps per sample (default: as many as fill --block-s)")
    add("--warmup", type=int, default=3, metavar="N", help="warm-up rounds of one step (default: 3)")
    add("--batch", type=int, default=0, metavar="N", help="batch size per rank (default: the model's)")
    add(
        "--image-size",
        type=int,
        default=IMAGE_SIZE,
        metavar="N",
        help=f"pixels a side, ResNets (default: {IMAGE_SIZE})",
    )
    add("--block-s", type=float, default=0.4, metavar="S", help="seconds per sample (default: 0.4)")
    add("--no-memory", action="store_true", help="skip the jobs that measure each contender's peak memory")
    add = _add_benchmark(commands, "allreduce", _allreduce)
    add("--dtype", default="float32,bfloat16", metavar="D,D,...", help=f"some of {', '.join(DTYPES)} (default: two)")
    add("--max-bytes", type=_size, default=256 << 20, metavar="N", help="the largest tensor, e.g. 25M (default: 256M)")
    add("--sizes", type=_sizes, metavar="N,N,...", help="only these sizes in bytes, e.g. 8,64K,25M")
    add("--block-s", type=float, default=0.03, metavar="S", help="seconds per sample (default: 0.03)")
    _add_benchmark(commands, "startup", _startup, rounds=7)
    add = _add_benchmark(commands, "state", _state, rounds=5)
    add("--bytes", type=_size, default=768 << 20, metavar="N", help="size of the model, e.g. 800M (default: 768M)")
    for name, command in commands.choices.items():
        usual, examples = HELP[name]
        add_help(command, dict.fromkeys(usual, ""), examples)
        set_completions(command, {"launcher": tuple(LAUNCHERS)})


def _add_benchmark(commands: Any, name: str, build: Builder, rounds: int = 15) -> Any:
    """Add the options that all or most benchmarks have; return what adds others."""
    summary = BENCHMARKS[name]
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", add_help=False
    )
    places = dict.fromkeys(("hosts", "hostfile", "network_interface"))
    command.set_defaults(build=build, launcher=None, launches=1, slow_link=None, **places)
    add = command.add_argument
    if name == "startup":
        add("-np", "--ranks", default="2", metavar="N,N,...", help="numbers of ranks on this host (default: 2)")
    elif name == "state":
        add("-np", "--ranks", type=int, default=2, metavar="N", help="number of ranks on this host (default: 2)")
    else:
        add_host_options(add)
    add("--backend", metavar="B[:T],...", help="e.g. native,horovod:mpi (default: all usable)")
    if name != "startup":  # each raw library needs a specific launcher
        add(
            "--launcher",
            metavar="L",
            help=f"one of {', '.join(LAUNCHERS)} (default: mpirun for MPI, else torchrun or srun)",
        )
        add("--launches", type=int, default=1, metavar="N", help="number of launches of each job (default: 1)")
    add("--rounds", type=int, default=rounds, metavar="N", help=f"samples of each contender (default: {rounds})")
    if name in ("step", "allreduce"):
        add("--slow-link", metavar="RATE", help="put half of the ranks behind a link of e.g. 1gbit")
    add("--device", choices=("auto", "cpu", *KINDS), default="auto", help="default: the GPU if torch sees one")
    add("--threads", type=int, default=1, metavar="N", help="OMP_NUM_THREADS per rank (default: 1)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of every rank; may be repeated")
    add("--timeout", type=float, default=1800.0, metavar="S", help="time limit of a job in seconds (default: 1800)")
    add("--json", metavar="FILE", help="also write JSON to FILE; - for JSON alone")
    add("--dry-run", action="store_true", help="print the command lines and exit")
    return add


def run(args: argparse.Namespace) -> int:
    """Run the jobs and report their results; return 1 if a job failed, 130 after Ctrl-C."""
    check_writable("--json", args.json)
    check_minimum(args, {"rounds": 1, "launches": 1})
    placement = HERE
    if args.benchmark in ON_HOSTS:
        if args.ranks is not None:
            check_minimum(args, {"ranks": 1})
        placement = probe_placement(args, place_ranks(args))
    args.placement = placement
    if args.slow_link is not None:
        check_minimum(args, {"ranks": 2})
        if not args.dry_run:
            require_slow_link(args.slow_link, find_site())
    where = Path.cwd() if placement.hosts else None  # that the hosts share
    with tempfile.TemporaryDirectory(prefix=".dualdist-bench-", dir=where, ignore_cleanup_errors=True) as folder:
        planned_jobs, summarize, tables = args.build(args, Path(folder))
        jobs = list(planned_jobs)
        if args.dry_run:
            for planned in jobs:
                print(planned.command_line)
            return 0
        for name in ("rich", "scipy"):
            if find_spec(name) is None:
                raise UsageError(f"dualdist bench needs {name}: pip install 'dualdist[bench]'")
        done, failed, code = _run_jobs(jobs, args.timeout)
    described: list[dict[str, Any]] = [
        {"job": planned.title, "command": planned.command_line, "reports": reports} for planned, reports in done
    ]
    described += [
        {"job": planned.title, "command": planned.command_line, "reports": [], "error": error}
        for planned, error in failed
    ]
    settings = {name: getattr(args, name) for name in ("ranks", "threads", "device", "rounds", "launches")}
    settings |= {"env": redact_command(args.env), "slow_link": args.slow_link, **describe_placement(placement)}
    results = summarize(done)
    record = make_record(args.benchmark, format_command(sys.argv[1:]), settings, described, results)
    write_json(args.json, dump_json(record, indent=1))
    if args.json != "-":
        failures = [failure_table("job", [(planned.title, error) for planned, error in failed])] if failed else []
        print_report(record, [*tables(results), *failures], sys.stdout)
    return code


def _step(args: argparse.Namespace, folder: Path) -> Benchmark:
    check_minimum(args, {"batch": 0, "steps": 0, "warmup": 1, "image_size": 32})
    contenders = tuple(args.contenders.split(",")) if args.contenders else ()
    fields = ("rounds", "steps", "block_s", "warmup", "batch", "image_size", "optimizer")
    shared = {name: getattr(args, name) for name in fields}
    options = [StepOptions(name, contenders, **shared) for name in args.model or DEFAULT_MODELS]
    settings = make_settings(args, args.ranks, args.threads, args.placement)
    # A contender's memory does not depend on the network, and raw torch would connect by the host's name.
    with_memory = not args.no_memory and args.slow_link is None and not args.placement.hosts
    configs = _configs(args, settings)
    jobs = bench_step.plan_jobs(configs, options, settings, folder, launches=args.launches, with_memory=with_memory)
    return jobs, partial(bench_step.summarize, slow_link=args.slow_link), bench_step.tables


def _allreduce(args: argparse.Namespace, folder: Path) -> Benchmark:
    dtypes = tuple(dict.fromkeys(args.dtype.split(",")))
    for name in dtypes:
        require_choice(name, DTYPES, "dtype")
    sizes = args.sizes or bench_allreduce.sizes_up_to(args.max_bytes)
    options = AllreduceOptions(sizes, args.rounds, args.block_s, dtypes=dtypes)
    settings = make_settings(args, args.ranks, args.threads, args.placement)
    configs = _configs(args, settings, needs_raw=True)
    jobs = plan_launches("allreduce", configs, options, settings, folder, launches=args.launches)
    return jobs, partial(bench_allreduce.summarize, slow_link=args.slow_link), bench_allreduce.tables


def _startup(args: argparse.Namespace, folder: Path) -> Benchmark:
    settings = [make_settings(args, ranks, args.threads) for ranks in _counts(args.ranks)]
    configs = bench_startup.with_raw_launchers(_configs(args, settings[-1], needs_raw=True))
    jobs = bench_startup.plan_jobs(configs, settings, folder, rounds=args.rounds)
    return jobs, bench_startup.summarize, bench_startup.tables


def _state(args: argparse.Namespace, folder: Path) -> Benchmark:
    settings = make_settings(args, args.ranks, args.threads, args.placement)
    options = StateOptions(args.bytes, args.rounds)
    jobs = plan_launches("state", _configs(args, settings), options, settings, folder, launches=args.launches)
    return jobs, bench_state.summarize, bench_state.tables


def _configs(args: argparse.Namespace, settings: MeasurementSettings, *, needs_raw: bool = False) -> list[RunConfig]:
    """Return the configurations of --backend, by default all that can run here.

    Benchmarks of the raw libraries too are for the backends over those that cold_start.py describes.
    """
    launcher = LAUNCHER if args.slow_link is not None and args.launcher is None else args.launcher
    default = SRUN.name if args.placement.is_slurm else DEFAULT_LAUNCHER
    configs = parse_configs(args.backend or ",".join(registry.names()), launcher, default)
    without_raw = [each for each in configs if needs_raw and registry.get(each.backend).library not in RAW_LIBRARIES]
    if args.backend is not None:
        for each in without_raw:
            raise UsageError(
                f"backend {each.backend!r}: bench {args.benchmark} compares a backend with the raw library beneath it, "
                f"one of {', '.join(RAW_LIBRARIES)}; for this one use bench step"
            )
        if args.slow_link is None:  # a job that cannot run reports why
            return configs
    facts = find_facts(args, args.placement)
    reasons = refusal_reasons(configs, settings, facts)
    if args.backend is not None:
        for each, reason in reasons.items():
            raise UsageError(f"{each}: {reason}")
        return configs
    # Raw mpi4py is measured on CPU tensors only.
    on_gpu = [each for each in configs if facts.gpus and registry.get(each.backend).needs_mpi]
    usable = [each for each in configs if each not in (*reasons, *on_gpu, *without_raw)]
    if not usable:
        raise UsageError(f"no backend can run here: {'; '.join(reasons.values())}")
    return usable


def _run_jobs(jobs: list[PlannedJob], timeout_s: float) -> tuple[Done, Failed, int]:
    """Run the jobs; return results, failures and the exit status. A job that failed is not launched again."""
    done: Done = []
    failed: Failed = []
    try:
        with termination_raises():
            for number, planned in enumerate(jobs, 1):
                # An earlier launch of this job has the same tags except for its number.
                if any({**planned.tags, "launch": 0} == {**other.tags, "launch": 0} for other, _ in failed):
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


def _counts(text: str) -> tuple[int, ...]:
    """Parse numbers of ranks between commas."""
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--ranks {text}: expected whole numbers separated by commas, as 2,4,8")
    return tuple(sorted({int(word) for word in words}))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_size(word) for word in text.split(",")}))


def _size(text: str) -> int:
    """Parse a size in bytes: 8, 64K, 25M, 1G."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdecimal() or int(digits) * scale < 4:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size of 4 bytes or more, as 8, 64K or 25M")
    return int(digits) * scale

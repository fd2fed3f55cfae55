"""`dualdist compare`: its options, the contenders and settings that follow from them, the launches, and the report."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.bench.compare import output
from dualdist.bench.compare.launches import Launch, group_by_contender
from dualdist.bench.compare.metrics import ComparisonResult, summarize
from dualdist.bench.compare.runner import (
    Comparison,
    Contender,
    LaunchSchedule,
    RefusedContender,
    UserScript,
    baseline_contenders,
    format_duration,
    ordered_checks,
)
from dualdist.bench.compare.verdict import choices_to_save
from dualdist.bench.jobs import (
    BASELINES,
    DEFAULT_BASELINES,
    DUALDIST,
    IMAGE_SIZE,
    MODELS,
    MachineFacts,
    MeasurementSettings,
    TrainOptions,
    check_method,
    expand_configs,
    parse_env,
    refusal_reasons,
    split_words,
)
from dualdist.bench.placement import HERE, Placement, find_placement, probe_hosts
from dualdist.bench.report import dump_json, error_summary, format_command, make_record, print_report
from dualdist.bench.slow_link import LAUNCHER, require_slow_link
from dualdist.cli.help_formatter import set_completions
from dualdist.doctor.diagnosis import installed_backends
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.env_defaults import SLURM_JOB, threads_per_rank
from dualdist.launch.execute import find_site
from dualdist.launch.launchers import LAUNCHERS
from dualdist.launch.option import options_of
from dualdist.launch.processes import termination_raises
from dualdist.launch.run_request import RunRequest
from dualdist.utils import saved_choices
from dualdist.utils.accelerator import KINDS
from dualdist.utils.machine import usable_cores, versions
from dualdist.utils.output_file import check_writable, write_json
from dualdist.utils.package_probe import probe_torch
from dualdist.utils.redaction import redact_command
from dualdist.utils.suggest import require_choice
from dualdist.utils.variables import THREADS

EXAMPLES = (
    "dualdist compare",
    "dualdist compare -np 4 --model transformer --budget 20m --output report/",
    "dualdist compare -H hosta:2,hostb:2 --transports gloo,mpi",
    "dualdist compare --script train.py --save-choice -- --epochs 3",
)
USUAL = (
    "ranks",
    "hosts",
    "budget",
    "backends",
    "transports",
    "launchers",
    "model",
    "script",
    "output",
    "save_choice",
    "dry_run",
)
COMMON = dict.fromkeys(USUAL, "")
INTERRUPTED = 130
EXCLUDED = ("start", "sample")  # thousands of parameters, for the equivalence check only
SCRIPT_STEPS = 30
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dualdist compare [option ...] [--script train.py [-- argument ...]]"
    add = parser.add_argument
    add_host_options(add)
    add("--budget", default="15m", metavar="T", help="start no round that would exceed it (default: 15m)")
    add("--rounds", type=int, default=9, metavar="N", help="launches of each contender, at most (default: 9)")
    which = parser.add_argument_group("contenders: every combination, and baselines").add_argument
    which("--backends", metavar="A,B", help=f"some of {', '.join(registry.names())} (default: all)")
    which("--transports", metavar="A,B", help="some of shm, gloo, mpi, nccl (default: all)")
    which("--launchers", metavar="A,B", help="e.g. torchrun,mpirun (default: what fits each backend)")
    which("--baselines", metavar="A,B", help=f"some of {', '.join(BASELINES)}; '' for none (default: not ddp_view)")
    which("--compression", metavar="A,B", help="also compress each candidate: fp16, bf16, powersgd:RANK, topk:RATIO")
    which("--slow-link", metavar="RATE", help="put half of the ranks behind a link of e.g. 100mbit; needs root")
    which(
        "--self-check",
        type=float,
        metavar="PERCENT",
        help="check compare itself: run the first candidate again, and slowed",
    )
    work = parser.add_argument_group("training").add_argument
    work(
        "--model", choices=MODELS, default="resnet18", metavar="NAME", help="e.g. mlp, transformer (default: resnet18)"
    )
    work("--batch", type=int, default=0, metavar="N", help="global batch size (default: the model's per rank)")
    work("--steps", type=int, default=0, metavar="N", help="timed steps per launch (default: the model's)")
    work("--warmup", type=int, default=3, metavar="N", help="steps before the timed ones (default: 3)")
    work(
        "--image-size",
        type=int,
        default=IMAGE_SIZE,
        metavar="N",
        help=f"pixels a side, ResNets (default: {IMAGE_SIZE})",
    )
    work("--seed", type=int, default=0, metavar="N", help="seed of parameters, data, order of launches (default: 0)")
    work("--script", metavar="FILE", help="your own program, instead of a model")
    work("--as-horovod", action="store_true", help="the script imports horovod.torch: use dualdist.hvd instead")
    work("arguments", nargs="*", metavar="ARGUMENT", help="the script's arguments, after --")
    work("--threads", type=int, metavar="N", help="OMP_NUM_THREADS per rank (default: as dualdist run sets it)")
    work("--device", choices=("auto", "cpu", *KINDS), default="auto", help="default: the GPU if torch sees one")
    work("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of every rank; may be repeated")
    out = parser.add_argument_group("results").add_argument
    out("--output", metavar="DIR", help="write report.html, plots, tables and raw data")
    out("--json", metavar="FILE", help="also write JSON to FILE; - for JSON alone")
    out("--save-choice", action="store_true", help="let init('auto') choose the fastest from now on")
    out("--dry-run", action="store_true", help="print the command lines and exit")
    out("--timeout", type=float, default=600.0, metavar="S", help="time limit of a launch in seconds (default: 600)")
    set_completions(parser, {"launchers": tuple(LAUNCHERS), "backends": registry.names()})


def run(args: argparse.Namespace) -> int:
    """Launch the contenders in turn and report the fastest candidate; return 1 if there is no valid comparison."""
    placement = place_ranks(args)
    check_arguments(args)
    for name in ("rich", "scipy", *(("jinja2", "matplotlib") if args.output is not None else ())):
        if find_spec(name) is None:
            raise UsageError(f"dualdist compare needs {name}: pip install 'dualdist[compare]'")
    folder = None if args.output is None or args.dry_run else _make_folder(Path(args.output))
    placement = probe_placement(args, placement, folder)
    settings = make_settings(args, args.ranks, _threads(args, placement), placement)
    if args.slow_link is not None and not args.dry_run:
        require_slow_link(args.slow_link, settings.site)
    contenders, refused = select_contenders(args, settings)
    # In a folder that the hosts share.
    where = folder or (Path.cwd() if placement.hosts else None)
    with tempfile.TemporaryDirectory(prefix=".dualdist-compare-", dir=where, ignore_cleanup_errors=True) as records:
        comparison = Comparison(make_work(args, placement), settings, Path(records))
        budget_s = parse_budget(args.budget)
        schedule = LaunchSchedule(contenders, comparison.launch, rounds=args.rounds, budget_s=budget_s, seed=args.seed)
        if args.dry_run:
            for each in refused:
                print(f"dualdist compare: not {each.contender.label}: {error_summary(each.reason)}", file=sys.stderr)
            for contender, number in schedule.remaining:
                print(comparison.plan_job(contender, number).command_line)
            return 0
        launches, code = _launch_all(schedule)
    left_out, enough = schedule.left_out, schedule.enough
    result = summarize(contenders, refused, launches, schedule.ended, left_out=left_out, enough=enough)
    status = _report(args, placement, result, launches, folder)
    return code or status


def _make_folder(folder: Path) -> Path:
    """Create the folder of --output; raise UsageError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.resolve()
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be used ({error.strerror}); name another folder") from error


def _launch_all(schedule: LaunchSchedule) -> tuple[list[Launch], int]:
    """Return all launches, also after an interrupt, and the exit status."""
    launches: list[Launch] = []
    label = "started"

    def show() -> None:
        done, left = len(launches), format_duration(schedule.remaining_s())
        words = f"[{done}/{done + len(schedule.remaining)}] {label} (about {left} left)"
        print(words, file=sys.stderr, flush=True)

    try:
        with termination_raises():
            show()
            for launch in schedule:
                launches.append(launch)
                label = f"round {launch.round + 1}, {launch.label}{' FAILED' if launch.error else ''}"
                show()
    except KeyboardInterrupt:
        return launches, INTERRUPTED
    except SystemExit as end:
        return launches, int(end.code or 0)
    return launches, 0


def _report(
    args: argparse.Namespace,
    placement: Placement,
    result: ComparisonResult,
    launches: list[Launch],
    folder: Path | None,
) -> int:
    """Print and write the result; return 1 if the comparison is not valid."""
    jobs = [_describe_launch(launch) for launch in launches]
    record = make_record(
        "compare", format_command(sys.argv[1:]), describe_settings(args, placement), jobs, asdict(result)
    )
    if args.json != "-":
        print_report(record, list(output.tables(result)), sys.stdout)
        print(f"\nmachine   {result.noise}\nlaunches  {result.launches}, {result.ended}")
        if result.equivalence.launches:
            print(f"training  {result.equivalence}")
        print(f"verdict   {result.verdict.headline}\n          {result.verdict.sentence}", flush=True)
    write_json(args.json, dump_json(record, indent=1))
    if folder is not None:
        page = output.write_folder(folder, result, record, launches)
        print(f"page      {page}", file=sys.stderr if args.json == "-" else sys.stdout)
    is_valid = result.verdict.kind not in ("invalid", "nothing")
    if args.save_choice and is_valid:
        _save_choices(result, launches, record["timestamp"])
    elif args.save_choice:
        print("dualdist compare: nothing saved: the comparison is not valid", file=sys.stderr)
    return 0 if is_valid else 1


def _describe_launch(launch: Launch) -> dict[str, Any]:
    found = asdict(launch)
    found["ranks"] = [{name: rank[name] for name in rank if name not in EXCLUDED} for rank in found["ranks"]]
    return found


def _save_choices(result: ComparisonResult, launches: list[Launch], timestamp: str) -> None:
    """Save the fastest candidates to the user's configuration, and print them to standard error."""
    by_key, path = group_by_contender(launches), saved_choices.choices_path(os.environ)
    candidates = {each.label: by_key[each.key] for each in result.contenders if each.is_candidate}
    found = list(choices_to_save(candidates, timestamp))
    choices = [each for each in found if isinstance(each, saved_choices.SavedChoice)]
    if choices:
        saved_choices.save_choices(path, choices)
    for each in found:
        line = each if isinstance(each, str) else f"saved {each.backend} over {each.transport} for {each.conditions}"
        print(f"dualdist compare: {line}", file=sys.stderr)
    if choices:
        shared = ", which every host must see: copy it to those that have another home folder"
        needs_copy = any(each.conditions.hosts > 1 for each in choices)
        print(f"dualdist compare: in {path}{shared if needs_copy else ''}", file=sys.stderr)


def select_contenders(
    args: argparse.Namespace, settings: MeasurementSettings
) -> tuple[list[Contender], list[RefusedContender]]:
    """Return the contenders to run and those that cannot run here; raise UsageError if no candidate can."""
    facts = find_facts(args, settings.placement, is_script=args.script is not None)
    if args.device in KINDS and not facts.gpus:
        raise UsageError(f"--device {args.device}, but torch sees no GPU here")
    backends = split_words(args.backends) or registry.names()
    launchers = [LAUNCHER] if args.slow_link is not None and args.launchers is None else split_words(args.launchers)
    configs = expand_configs(launchers, backends, split_words(args.transports), os.environ)
    reasons = refusal_reasons(configs, settings, facts)
    refused = [RefusedContender(Contender(DUALDIST, config), reason) for config, reason in reasons.items()]
    contenders = [Contender(DUALDIST, config) for config in configs if config not in reasons]
    if not contenders:
        lines = [f"{each.contender.label}: {error_summary(each.reason)}" for each in refused]
        raise UsageError("\n  ".join(["no candidate can run here:", *lines]))
    names = list(dict.fromkeys(DEFAULT_BASELINES if args.baselines is None else split_words(args.baselines)))
    for name in names:
        require_choice(name, BASELINES, "baseline")
    if args.script is not None:
        if args.baselines is not None and set(names) - {"one"}:
            raise UsageError(f"--baselines {args.baselines}: with a script only `one` can run, a single rank")
        names = [name for name in names if name == "one"]
    baselines = list(baseline_contenders(names, contenders, settings.placement, uses_gpus=facts.gpus > 0))
    if args.self_check is not None:
        first = contenders[0].config
        slowdown = 1 + args.self_check / 100
        contenders += [Contender(DUALDIST, first, copy=1), Contender(DUALDIST, first, slowdown, copy=2)]
    compressions = [check_method(name) for name in split_words(args.compression)]
    contenders += [Contender(name, each.config) for each in contenders if each.is_candidate for name in compressions]
    contenders += [each for each in baselines if isinstance(each, Contender)]
    contenders += ordered_checks(contenders, settings.ranks, uses_gpus=facts.gpus > 0)
    refused += [each for each in baselines if isinstance(each, RefusedContender)]
    return contenders, refused


def add_host_options(add: Callable[..., Any]) -> None:
    """Add -np, and where the ranks run, as for `dualdist run`."""
    add("-np", "--ranks", type=int, metavar="N", help="number of ranks (default: as the hosts say, or 2)")
    known = options_of(RunRequest)
    for name in ("hosts", "hostfile", "network_interface"):
        spec = known[name]
        add(*spec.flags_of(name), dest=name, metavar=spec.metavar, help=spec.help)


def place_ranks(args: argparse.Namespace) -> Placement:
    """Return where the ranks run, and set args.ranks if it was not given."""
    environ: Mapping[str, str] = {} if args.slow_link is not None else os.environ  # its hosts are on this machine
    found, args.ranks = find_placement(args.hosts, args.hostfile, args.network_interface, args.ranks, environ)
    if found.hosts and args.slow_link is not None:
        raise UsageError(f"--slow-link makes hosts on this machine, and -H has others ({found}): give one of them")
    return found


def probe_placement(args: argparse.Namespace, placement: Placement, folder: Path | None = None) -> Placement:
    """Return the placement with each host's cores and GPUs; LaunchError if a host cannot take part."""
    if not placement.hosts:
        return placement
    return probe_hosts(placement, find_site(), os.environ, folder or Path.cwd(), has_gpus=_may_use_gpus(args))


def _may_use_gpus(args: argparse.Namespace) -> bool:
    return args.device != "cpu" and not versions().get("torch", "").endswith("+cpu")


def find_facts(args: argparse.Namespace, placement: Placement, *, is_script: bool = False) -> MachineFacts:
    """Return the properties of this machine, or of the hosts, that decide which configurations can run."""
    gpus = placement.usable_gpus
    if not placement.hosts and _may_use_gpus(args):
        probe = probe_torch(os.environ)  # a process of its own imports torch, which is slow and may be broken
        if isinstance(probe, str):
            raise LaunchError(f"torch cannot be imported by {sys.executable}: {probe}")
        gpus = probe.gpus
    return MachineFacts(gpus, installed_backends(), SLURM_JOB in os.environ, is_script)


def make_work(args: argparse.Namespace, placement: Placement = HERE) -> TrainOptions | UserScript:
    settings = describe_settings(args, placement)
    if args.script is not None:
        from dualdist.launch.run_request import program_words

        argv = program_words([args.script, *args.arguments], is_module=False, as_horovod=args.as_horovod)
        return UserScript(argv, args.warmup, settings["steps"])
    names = ("model", "batch", "warmup", "steps", "image_size", "seed")
    sizes = SIZES if args.slow_link is None else SIZES[:3]  # the others would take minutes
    return TrainOptions(method=DUALDIST, sizes=sizes, **{name: settings[name] for name in names})


def parse_budget(text: str) -> float:
    """Return the seconds of 120s, 2m, 1h or 90."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        found = float(number) * UNITS[unit]
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UsageError(f"--budget {text}: expected a time above 0, as 120s, 10m or 1h")
    return found


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError for invalid arguments, before anything is launched."""
    check_writable("--json", args.json)
    if args.save_choice:
        saved_choices.load_choices(saved_choices.choices_path(os.environ))
    parse_budget(args.budget)
    check_minimum(args, {"rounds": 1, "batch": 0, "steps": 0, "warmup": 1, "image_size": 32, "ranks": 2})
    if args.batch % args.ranks:
        raise UsageError(f"--batch {args.batch}: expected a multiple of the {args.ranks} ranks")
    if args.self_check is not None and not 0 < args.self_check <= 100:
        raise UsageError(f"--self-check {args.self_check:g}: expected a percentage above 0, up to 100")
    if args.script is None and (args.arguments or args.as_horovod):
        raise UsageError("arguments after -- and --as-horovod are for a --script")
    if args.script is not None and (args.batch or args.self_check is not None):
        raise UsageError("--batch and --self-check are for models: a script chooses its batch and runs unmodified")
    if args.save_choice and args.slow_link is not None:
        raise UsageError("--save-choice with --slow-link: what is fastest there is not what is fastest on this machine")
    if args.script is not None and args.compression is not None:
        raise UsageError("--compression is for models: a script passes its own to dd.wrap_optimizer")


def describe_placement(placement: Placement) -> dict[str, Any]:
    if not placement.hosts:
        return {}
    return {"hosts": str(placement), "network_interface": placement.interface}


def check_minimum(args: argparse.Namespace, minima: dict[str, int]) -> None:
    for option, minimum in minima.items():
        if getattr(args, option) < minimum:
            raise UsageError(f"--{option.replace('_', '-')} {getattr(args, option)}: expected {minimum} or more")


def make_settings(
    args: argparse.Namespace, ranks: int, threads: int, placement: Placement = HERE
) -> MeasurementSettings:
    """Return the settings of the jobs of `compare` or `bench`."""
    env, slow_link = parse_env(args.env), args.slow_link or ""
    return MeasurementSettings(ranks, find_site(), threads, args.device, args.timeout, env, slow_link, placement)


def _threads(args: argparse.Namespace, placement: Placement) -> int:
    """Return --threads, else the number that `dualdist run` gives a rank, for which a saved choice is valid."""
    if args.threads is not None:
        return int(args.threads)
    own = os.environ.get(THREADS, "").partition(",")[0].strip()  # the first number is that of the outermost level
    if own.isdecimal() and int(own):
        return int(own)
    return placement.threads if placement.hosts else threads_per_rank(usable_cores(), args.ranks)


def describe_settings(args: argparse.Namespace, placement: Placement = HERE) -> dict[str, Any]:
    """Return the settings with defaults filled in and secrets hidden."""
    names = ["ranks", "device", "seed", "rounds", "budget", "warmup"]
    found = {name: getattr(args, name) for name in names}
    found |= {"threads": _threads(args, placement), "env": redact_command(args.env)}
    found |= describe_placement(placement)
    found |= {name: value for name in ("compression", "slow_link") if (value := getattr(args, name)) is not None}
    if args.script is not None:
        arguments = redact_command(args.arguments)
        return {**found, "script": args.script, "arguments": arguments, "steps": args.steps or SCRIPT_STEPS}
    model = MODELS[args.model]
    found |= {"model": args.model, "image_size": args.image_size}
    return {**found, "batch": args.batch or model.batch * args.ranks, "steps": args.steps or model.steps}

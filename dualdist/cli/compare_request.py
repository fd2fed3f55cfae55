"""Arguments of `dualdist compare`: checks, and the cells, work, settings and conditions that follow from them."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dualdist
from dualdist.backends import registry
from dualdist.bench.compare.matrix import (
    BASELINES,
    DEFAULT_BASELINES,
    DUALDIST,
    Cell,
    MatrixFacts,
    RefusedCell,
    baseline_cells,
    expand_configs,
    split_runnable,
)
from dualdist.bench.jobs import MeasurementSettings, parse_env
from dualdist.bench.options import MODELS, TrainOptions
from dualdist.bench.report import check_writable, error_summary
from dualdist.doctor import installed_backends
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.control_channel import CONTROL_VARIABLE
from dualdist.launch.env_defaults import FORWARDED_PREFIXES, SLURM_JOB, THREADS, threads_per_rank
from dualdist.launch.job import BACKEND_VARIABLE, TRANSPORT_VARIABLE, Site
from dualdist.launch.processes import JOB_MARK
from dualdist.rendezvous import backend_selection
from dualdist.utils.machine import machine, usable_cores, versions
from dualdist.utils.package_probe import probe_torch
from dualdist.utils.preemption_protocol import NOTICE
from dualdist.utils.redaction import redact_command
from dualdist.utils.suggest import require_choice

if TYPE_CHECKING:
    from dualdist.bench.compare.runner import UserScript

SCRIPT_STEPS = 30
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
# Variables inherited by the ranks that change communication or computation.
INHERITED = (*FORWARDED_PREFIXES, "OMPI_MCA_", "OPAL_", "PMIX_MCA_", "PRTE_MCA_", "MPICH_", "I_MPI_", "CUDA_")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def select_cells(
    args: argparse.Namespace, site: Site, settings: MeasurementSettings
) -> tuple[list[Cell], list[RefusedCell]]:
    """Return the cells to run and those that cannot run here; raise UsageError if no contender can."""
    facts = MatrixFacts(
        gpus=0 if args.device == "cpu" else count_gpus(site),
        device=args.device,
        backends=installed_backends(),
        is_in_slurm=SLURM_JOB in os.environ,
        is_script=args.script is not None,
    )
    if args.device == "cuda" and not facts.gpus:
        raise UsageError("--device cuda, but torch sees no GPU here")
    backends = _split(args.backends) or registry.names()
    configs = expand_configs(_split(args.launchers), backends, _split(args.transports), os.environ)
    cells, refused = split_runnable(configs, settings, site, facts)
    if cells and args.self_check is not None:
        first = cells[0].config
        cells += [Cell(DUALDIST, first, copy=1), Cell(DUALDIST, first, slowdown=1 + args.self_check / 100, copy=2)]
    names = list(dict.fromkeys(DEFAULT_BASELINES if args.baselines is None else _split(args.baselines) or []))
    for name in names:
        require_choice(name, BASELINES, "baseline")
    if args.script is not None:
        if args.baselines is not None and set(names) - {"one"}:
            raise UsageError(f"--baselines {args.baselines}: with a script only `one` can run, a single rank")
        names = [name for name in names if name == "one"]
    for each in baseline_cells(names, cells, facts):
        if isinstance(each, Cell):
            cells.append(each)
        else:
            refused.append(each)
    if not any(cell.is_contender for cell in cells):
        reasons = [f"{each.cell.label}: {error_summary(each.reason)}" for each in refused if each.cell.is_contender]
        raise UsageError("\n  ".join(["no contender can run here:", *reasons]))
    return cells, refused


def count_gpus(site: Site) -> int:
    """Return how many GPUs torch sees, from a separate process: torch is slow to import, and may be broken."""
    if versions().get("torch", "").endswith("+cpu"):
        return 0
    probe = probe_torch(os.environ)
    if isinstance(probe, str):
        raise LaunchError(f"torch cannot be imported by {site.python}: {probe}")
    return probe.gpus


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def make_work(args: argparse.Namespace) -> TrainOptions | UserScript:
    """Return the model to train, or the user's script."""
    settings = describe_settings(args)
    if args.script is not None:
        from dualdist.bench.compare.runner import UserScript
        from dualdist.cli.run import program_words

        argv = program_words([args.script, *args.arguments], is_module=False, as_horovod=args.as_horovod)
        return UserScript(argv, args.warmup, settings["steps"])
    names = ("model", "batch", "warmup", "steps", "image_size", "seed")
    return TrainOptions(contender=DUALDIST, sizes=SIZES, **{name: settings[name] for name in names})


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
    check_writable("--json", args.json, args.output)
    check_writable("--csv", args.csv, args.output)
    if args.save_choice:
        backend_selection.load_choices(backend_selection.choices_path(os.environ))
    parse_budget(args.budget)
    require_choice(args.model, MODELS, "model")
    check_minimum(args, {"rounds": 1, "batch": 0, "steps": 0, "warmup": 1, "image_size": 32, "ranks": 2})
    if args.batch % args.ranks:
        raise UsageError(f"--batch {args.batch}: expected a multiple of the {args.ranks} ranks")
    if args.self_check is not None and not 0 < args.self_check <= 100:
        raise UsageError(f"--self-check {args.self_check:g}: expected a percentage above 0, up to 100")
    if args.script is None and (args.arguments or args.as_horovod):
        raise UsageError("arguments after -- and --as-horovod are for a --script")
    if args.script is not None and (args.batch or args.self_check is not None):
        raise UsageError("--batch and --self-check are for models: a script chooses its batch and runs unmodified")


def check_minimum(args: argparse.Namespace, minima: dict[str, int]) -> None:
    """Raise UsageError if an option is below its minimum."""
    for option, minimum in minima.items():
        if getattr(args, option) < minimum:
            raise UsageError(f"--{option.replace('_', '-')} {getattr(args, option)}: expected {minimum} or more")


def make_settings(args: argparse.Namespace) -> MeasurementSettings:
    """Return the settings of all launches."""
    return MeasurementSettings(
        args.ranks, _threads(args), args.device, args.timeout, min(300.0, args.timeout), parse_env(args.env)
    )


def _threads(args: argparse.Namespace) -> int:
    """Return --threads, else the number that `dualdist run` gives a rank here, for which a saved choice is valid."""
    if args.threads is not None:
        return int(args.threads)
    own = os.environ.get(THREADS, "").partition(",")[0].strip()  # the first number is that of the outermost level
    return int(own) if own.isdecimal() and int(own) else threads_per_rank(usable_cores(), args.ranks)


def describe_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings with defaults filled in and secrets hidden."""
    names = ["ranks", "device", "seed", "rounds", "budget", "warmup"]
    found = {name: getattr(args, name) for name in names}
    found |= {"threads": _threads(args), "env": redact_command(args.env)}
    if args.script is not None:
        arguments = redact_command(args.arguments)
        return {**found, "script": args.script, "arguments": arguments, "steps": args.steps or SCRIPT_STEPS}
    model = MODELS[args.model]
    found |= {"model": args.model, "image_size": args.image_size}
    return {**found, "batch": args.batch or model.batch * args.ranks, "steps": args.steps or model.steps}


def describe_conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Return what must be equal in all launches of a comparison, also after it is resumed."""
    conditions = describe_settings(args)
    del conditions["rounds"], conditions["budget"]
    own = {BACKEND_VARIABLE, TRANSPORT_VARIABLE, CONTROL_VARIABLE, JOB_MARK, NOTICE, *make_settings(args).variables()}
    names = sorted(name for name in os.environ if name.startswith(INHERITED) and name not in own)
    conditions |= {
        "env": _redact_with_hash(args.env),
        "inherited": _redact_with_hash([f"{name}={os.environ[name]}" for name in names]),
        "as_horovod": args.as_horovod,
        "self_check": args.self_check,
        "dualdist": _package_digest(),
    }
    if args.script is not None:
        conditions |= {
            "arguments": _redact_with_hash(args.arguments),
            "script": str(Path(args.script).resolve()),
            "script_sha256": _script_digest(args.script),
        }
    return {**conditions, "machine": asdict(machine()), "versions": versions()}


def _redact_with_hash(words: Sequence[str]) -> list[str]:
    """Hide the values of secrets, with a hash that shows if they changed."""
    return [
        shown if shown == word else f"{shown} (SHA-256 {hashlib.sha256(word.encode()).hexdigest()[:16]})"
        for word, shown in zip(words, redact_command(words), strict=True)
    ]


def _script_digest(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"--script {name}: cannot be read ({error.strerror})") from error


def _package_digest() -> str:
    """Return a digest of all Python files of dualdist, whose version stays the same during development."""
    found, folder = hashlib.sha256(), Path(dualdist.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()

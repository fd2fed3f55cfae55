"""What was asked of `dualdist compare`: checked, and as the cells, the work and the setting of its launches."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dualdist
from dualdist.bench.cases import MODELS, TrainOptions
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
from dualdist.bench.jobs import MeasurementSettings
from dualdist.bench.report import check_file, last_words
from dualdist.doctor import installed_backends
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.control_channel import CONTROL_VARIABLE
from dualdist.launch.env_defaults import FORWARDED_PREFIXES, SLURM_JOB, THREADS, threads_per_rank
from dualdist.launch.job import BACKEND_TRANSPORTS, BACKEND_VARIABLE, TRANSPORT_VARIABLE
from dualdist.launch.launchers import Site
from dualdist.launch.processes import JOB_MARK
from dualdist.rendezvous import saved_choice
from dualdist.utils.exit_codes import NOTICE
from dualdist.utils.machine import machine, usable_cores, versions
from dualdist.utils.package_probe import probe_torch
from dualdist.utils.redaction import redact_command
from dualdist.utils.suggest import require_choice

if TYPE_CHECKING:
    from dualdist.bench.compare.runner import UserScript

SCRIPT_STEPS = 30
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20)
# Variables that ranks inherit and that change how they communicate or compute.
INHERITED = (*FORWARDED_PREFIXES, "OMPI_MCA_", "OPAL_", "PMIX_MCA_", "PRTE_MCA_", "MPICH_", "I_MPI_", "CUDA_")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def cells_of(
    args: argparse.Namespace, site: Site, setting: MeasurementSettings
) -> tuple[list[Cell], list[RefusedCell]]:
    """What will run, and what cannot."""
    facts = MatrixFacts(
        gpus=0 if args.device == "cpu" else gpus_of(site),
        device=args.device,
        backends=installed_backends(),
        is_in_slurm=SLURM_JOB in os.environ,
        is_script=args.script is not None,
    )
    if args.device == "cuda" and not facts.gpus:
        raise UsageError("--device cuda, but torch sees no GPU here")
    wanted = expand_configs(
        _words(args.launchers), _words(args.backends) or list(BACKEND_TRANSPORTS), _words(args.transports), os.environ
    )
    cells, refused = split_runnable(wanted, setting, site, facts)
    if cells and args.self_check is not None:
        first = cells[0].config
        cells += [Cell(DUALDIST, first, copy=1), Cell(DUALDIST, first, slow=1 + args.self_check / 100, copy=2)]
    names = list(dict.fromkeys(DEFAULT_BASELINES if args.baselines is None else _words(args.baselines) or []))
    for name in names:
        require_choice(name, BASELINES, "baseline")
    if args.script is not None:
        if args.baselines is not None and set(names) - {"one"}:
            raise UsageError(f"--baselines {args.baselines}: beside a script only `one` can run, one rank alone")
        names = [name for name in names if name == "one"]
    for each in baseline_cells(names, cells, facts):
        if isinstance(each, Cell):
            cells.append(each)
        else:
            refused.append(each)
    if not any(cell.is_contender for cell in cells):
        reasons = [f"{each.cell.label}: {last_words(each.reason)}" for each in refused if each.cell.is_contender]
        raise UsageError("\n  ".join(["no contender can run here:", *reasons]))
    return cells, refused


def gpus_of(site: Site) -> int:
    """How many GPUs torch sees; asked in a process of its own, as torch takes long to import, and may be broken."""
    if versions().get("torch", "").endswith("+cpu"):
        return 0
    said = probe_torch(os.environ)
    if isinstance(said, str):
        raise LaunchError(f"torch cannot be imported by {site.python}: {said}")
    return said.gpus


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def work_of(args: argparse.Namespace) -> TrainOptions | UserScript:
    """A model to be trained, or a script."""
    if args.script is not None:
        from dualdist.bench.compare.runner import UserScript
        from dualdist.cli.run import program_words

        words = program_words([args.script, *args.arguments], is_module=False, as_horovod=args.as_horovod)
        return UserScript(words, args.warmup, args.steps or SCRIPT_STEPS)
    model = MODELS[args.model]
    return TrainOptions(
        args.model,
        DUALDIST,
        args.batch or model.batch * args.ranks,
        args.warmup,
        args.steps or model.steps,
        args.image_size,
        sizes=SIZES,
        device=args.device,
        seed=args.seed,
    )


def seconds(text: str) -> float:
    """120s, 2m, 1h or 90."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        found = float(number) * UNITS[unit]
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UsageError(f"--budget {text}: expected a time above 0, as 120s, 10m or 1h")
    return found


def check(args: argparse.Namespace) -> None:
    """UsageError for what cannot be right, before anything takes time."""
    check_file("--json", args.json, args.output)
    check_file("--csv", args.csv, args.output)
    if args.save_choice:
        saved_choice.load(saved_choice.choices_path(os.environ))
    seconds(args.budget)
    require_choice(args.model, MODELS, "model")
    least = {"rounds": 1, "batch": 0, "steps": 0, "warmup": 1, "image_size": 32, "ranks": 2}
    for option, value in least.items():
        if getattr(args, option) < value:
            raise UsageError(f"--{option.replace('_', '-')} {getattr(args, option)}: expected {value} or more")
    if args.batch % args.ranks:
        raise UsageError(
            f"--batch {args.batch}: expected a multiple of the {args.ranks} ranks, so that all have as much"
        )
    if args.self_check is not None and not 0 < args.self_check <= 100:
        raise UsageError(f"--self-check {args.self_check:g}: expected a percentage above 0, up to 100")
    if args.script is None and (args.arguments or args.as_horovod):
        raise UsageError("arguments after -- and --as-horovod are for a --script")
    if args.script is not None and (args.batch or args.self_check is not None):
        raise UsageError("--batch and --self-check are for models: a script says its own batch, and runs unmodified")


def setting_of(args: argparse.Namespace) -> MeasurementSettings:
    for word in args.env:
        if not word.partition("=")[1]:
            raise UsageError(f"--env {word}: expected NAME=VALUE")
    variables = {word.partition("=")[0]: word.partition("=")[2] for word in args.env}
    return MeasurementSettings(
        args.ranks, _threads(args), args.device, args.timeout, min(300.0, args.timeout), variables
    )


def _threads(args: argparse.Namespace) -> int:
    """Of a rank: what was asked for, else what `dualdist run` gives it here, where a saved choice shall count."""
    if args.threads is not None:
        return int(args.threads)
    own = os.environ.get(THREADS, "").partition(",")[0].strip()  # the first number is that of the outermost level
    return int(own) if own.isdecimal() and int(own) else threads_per_rank(usable_cores(), args.ranks)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """As they count: what was left open has the value that it gets."""
    names = ["ranks", "threads", "device", "seed", "rounds", "budget", "warmup", "env"]
    names += ["script", "arguments"] if args.script is not None else ["model", "image_size"]
    found = {
        **{name: getattr(args, name) for name in names},
        "threads": _threads(args),
        "env": redact_command(args.env),
    }
    if args.script is not None:
        found["arguments"] = redact_command(args.arguments)
        return {**found, "steps": args.steps or SCRIPT_STEPS}
    model = MODELS[args.model]
    return {**found, "batch": args.batch or model.batch * args.ranks, "steps": args.steps or model.steps}


def conditions_of(args: argparse.Namespace) -> dict[str, Any]:
    """What all launches of a comparison have in common."""
    free = ("rounds", "budget")
    settings = {name: value for name, value in settings_of(args).items() if name not in free}
    own = {BACKEND_VARIABLE, TRANSPORT_VARIABLE, CONTROL_VARIABLE, JOB_MARK, NOTICE, *setting_of(args).variables()}
    names = sorted(name for name in os.environ if name.startswith(INHERITED) and name not in own)
    more: dict[str, Any] = {
        "env": _kept(args.env),
        "inherited": _kept([f"{name}={os.environ[name]}" for name in names]),
    }
    more |= {"as_horovod": args.as_horovod, "self_check": args.self_check, "dualdist": _digest_of_package()}
    if args.script is not None:
        more |= {
            "arguments": _kept(args.arguments),
            "script": str(Path(args.script).resolve()),
            "script_sha256": _digest_of_script(args.script),
        }
    return {**settings, **more, "machine": asdict(machine()), "versions": versions()}


def _kept(words: Sequence[str]) -> list[str]:
    """The words without the values of secrets; a hash says whether these are the same."""
    return [
        shown if shown == word else f"{shown} (SHA-256 {hashlib.sha256(word.encode()).hexdigest()[:16]})"
        for word, shown in zip(words, redact_command(words), strict=True)
    ]


def _digest_of_script(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"--script {name}: cannot be read ({error.strerror})") from error


def _digest_of_package() -> str:
    """Of all its files of Python: while one works on dualdist, its version stays the same."""
    found, folder = hashlib.sha256(), Path(dualdist.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()

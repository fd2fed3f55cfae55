"""The flags of single_process.py and train.py, which a YAML file may hold as well."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from common import curves
from common.data import FOLDERS
from common.help import parser as parser_of
from dualdist.utils.torchvision_import import load_torchvision

Options = argparse.Namespace


def number(kind: type, *, minimum: float = 0) -> Any:
    """The argparse type of an int or a float with a lower bound."""

    def parsed(text: str) -> Any:
        if not minimum <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {minimum} or more")
        return value

    parsed.__name__ = kind.__name__
    return parsed


# The flags, and the keys of --config FILE.
FLAGS: dict[str, dict[str, Any]] = {
    "backend": {"choices": ["auto", "native", "horovod", "mpi"], "help": "default: DUALDIST_BACKEND, else auto"},
    "dataset": {"choices": ["digits", "mnist", "cifar10", "fake"], "default": "digits"},
    "data": {"default": "data", "metavar": "DIR", "help": "where MNIST or CIFAR-10 lies"},
    "download": {"action": argparse.BooleanOptionalAction, "help": "one rank of each node downloads it"},
    "model": {"default": "resnet18", "help": "a classifier of torchvision, or mlp"},
    "image-size": {"type": number(int, minimum=8), "default": 32},
    "epochs": {"type": number(int, minimum=1), "default": 3},
    "max-steps": {"type": number(int, minimum=1), "default": math.inf, "metavar": "N", "help": "end after N steps"},
    "batch-size": {"type": number(int, minimum=1), "default": 32, "help": "per rank"},
    "lr": {"type": number(float), "default": 0.02, "help": "used as it stands, whatever the number of ranks"},
    "momentum": {"type": number(float), "default": 0.9},
    "weight-decay": {"type": number(float), "default": 5e-4},
    "clip": {"type": number(float), "default": 0.0, "help": "largest norm of the gradient; 0: no limit"},
    "seed": {"type": number(int), "default": 0},
    "device": {"choices": ["auto", "cpu", "cuda"], "default": "auto"},
    # Sums of floats depend on the number of threads, and each launcher sets another one: fixed, all runs agree.
    "threads": {"type": number(int, minimum=1), "default": 1, "help": "CPU threads per rank"},
    "workers": {"type": number(int), "default": 0, "help": "processes per rank that load images"},
    "summary": {"metavar": "FILE", "help": "write the summary as JSON"},
    **curves.FLAGS,
}


def parse(argv: Sequence[str] | None, program: str, about: str | None, *, ranks: bool = True) -> Options:
    """The flags, else the keys of --config FILE, else the defaults; a wrong one ends the program with one line."""
    argv = sys.argv[1:] if argv is None else argv
    parser = parser_of(about, program)
    parser.add_argument("--config", metavar="FILE", help="a YAML file with these flags as keys; flags win over it")
    for name, settings in FLAGS.items():
        if ranks or name != "backend":
            parser.add_argument(f"--{name}", **settings)
    options = parser.parse_args(argv)
    if options.config:
        from_file = flags_in(options.config, parser)
        parser.prog += f": --config {options.config}"  # the flags were fine: what is wrong now is in the file
        options = parser.parse_args([*from_file, *argv])
    if options.model != "mlp":
        models = load_torchvision().models
        valid = {"mlp", *models.list_models(module=models)} - {"googlenet", "inception_v3"}  # return more than scores
        if options.model not in valid:
            parser.error(f"--model {options.model}: unknown; {nearest(options.model, valid)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    folder = FOLDERS.get(options.dataset)
    if folder and not (options.download or Path(options.data, folder).is_dir()):
        parser.error(f"--data {options.data}: holds no folder {folder}; name another or add --download")
    if options.device == "auto":
        options.device = None
    options.started = time.perf_counter()
    return options


def flags_in(file: str, parser: argparse.ArgumentParser) -> list[str]:
    """The YAML file's keys as flags."""
    try:
        keys = yaml.safe_load(Path(file).read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"--config {file}: {' '.join(str(error).split())}")
    if not isinstance(keys, dict):
        parser.error(f"--config {file}: expected lines such as `epochs: 3`, not a {type(keys).__name__}")
    flags = []
    for key, value in keys.items():
        name = str(key).replace("_", "-")
        if name not in FLAGS:
            parser.error(f"--config {file}: unknown key {key!r}; {nearest(name, FLAGS)}")
        kind = getattr(FLAGS[name].get("type"), "__name__", "bool" if "action" in FLAGS[name] else "str")
        fitting = {"bool": bool, "int": int, "float": (int, float, str), "str": str}[kind]  # YAML takes 1e-3 for text
        if not isinstance(value, fitting) or (isinstance(value, bool) and kind != "bool"):
            parser.error(f"--config {file}: {key}: expected {kind}, not {value!r}")
        flags.append(f"--{name}={value}" if kind != "bool" else f"--{name}" if value else f"--no-{name}")
    return flags


def nearest(name: str, valid: Iterable[str]) -> str:
    return f"did you mean {difflib.get_close_matches(name, sorted(valid), 1, cutoff=0)[0]!r}?"

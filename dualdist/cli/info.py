"""`dualdist info`: which backend this process would get, in one line; nothing is started."""

from __future__ import annotations

import argparse
import os

from dualdist.doctor.diagnosis import installed_backends
from dualdist.doctor.explain import backend_of, wrong_choices
from dualdist.doctor.host import may_use_gpus
from dualdist.environments import detect
from dualdist.errors import UsageError

EXAMPLES = ("dualdist info", "torchrun --nproc-per-node 2 --no-python dualdist info")
COMMON: dict[str, str] = {}


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of this sub-command."""


def run(args: argparse.Namespace) -> int:
    """Print the line; an error where the variables are broken, or name no backend."""
    topology = detect(os.environ)
    if wrong := wrong_choices(os.environ):
        raise UsageError("; ".join(wrong))
    name, why = backend_of(os.environ, topology, installed_backends(), has_gpu=may_use_gpus(os.environ))
    print(f"backend {name}, rank {topology.rank} of {topology.size}, started by {topology.launcher} ({why})")
    return 0

"""`dualdist info`: print the backend that this process would use, in one line; nothing is started."""

import argparse
import os

from dualdist.doctor.diagnosis import installed_backends
from dualdist.doctor.explain import explain_backend, invalid_choices
from dualdist.doctor.facts import may_use_gpus
from dualdist.environments import detect
from dualdist.errors import UsageError
from dualdist.utils.machine import core_language

EXAMPLES = ("dualdist info", "torchrun --nproc-per-node 2 --no-python dualdist info")
COMMON: dict[str, str] = {}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(args: argparse.Namespace) -> int:
    """Print the line; raise TopologyError or UsageError where the variables are invalid."""
    topology = detect(os.environ)
    if invalid := invalid_choices(os.environ):
        raise UsageError("; ".join(invalid))
    name, why = explain_backend(os.environ, topology, installed_backends(), has_gpu=may_use_gpus(os.environ))
    started = "" if topology.launcher == "none" else f", started by {topology.launcher}"
    extension = "with" if core_language() == "C++" else "without"
    print(f"backend {name}, rank {topology.rank} of {topology.size}{started} ({why}), {extension} the C++ extension")
    return 0

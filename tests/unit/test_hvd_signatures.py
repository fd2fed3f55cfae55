"""dualdist.hvd has every public name of horovod.torch with its signature; each is read in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import importlib, inspect, json, sys

def shown(value):
    if inspect.isclass(value) or inspect.ismodule(value) or callable(value):
        return getattr(value, "__name__", type(value).__name__).rpartition(".")[2]
    return value if isinstance(value, (int, float, str, tuple, list, type(None))) else type(value).__name__

def signature(value):
    return [(p.name, str(p.kind), "-" if p.default is p.empty else shown(p.default))
            for p in inspect.signature(value).parameters.values()]

def described(value):
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value):
        methods = {n: m for n, m in vars(value).items() if n == "__init__" or not n.startswith("_")}
        return {n: signature(getattr(value, n)) if callable(getattr(value, n)) else shown(m)
                for n, m in methods.items()}
    return signature(value) if callable(value) else shown(value)

found = {}
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    part = name.partition("horovod.torch")[2] or name.partition("dualdist.hvd")[2]
    for attribute in dir(module):
        value = getattr(module, attribute)
        own = getattr(value, "__module__", None) or name
        ours = own.startswith("horovod") or own.startswith("dualdist")
        defined_here = part == "" or (own.endswith(part) and not inspect.ismodule(value))
        if not attribute.startswith("_") and ours and (defined_here or "--all" in sys.argv):
            found[f"{part}.{attribute}"] = described(value)
print(json.dumps(found))
"""
MODULES = ("", ".mpi_ops", ".compression", ".functions", ".elastic")
# The compiled extension, and what Horovod's modules import for themselves.
NOT_PUBLIC = (
    "mpi_lib_v2",
    "mpi_lib",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "check_installed_version",
    "get_average_backwards_compatibility_fun",
    "gpu_available",
    "num_rank_is_power_2",
    "run_fn",
)


def described(root: str, *, which: str) -> dict[str, Any]:
    """Return the signature, value or members of each public name below a root; with --own those defined there."""
    argv = [sys.executable, "-c", PROGRAM, which, *(root + module for module in MODULES)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def faces() -> tuple[dict[str, Any], dict[str, Any]]:
    return described("horovod.torch", which="--own"), described("dualdist.hvd", which="--all")


def test_every_public_name_is_there(faces: tuple[dict[str, Any], dict[str, Any]]) -> None:
    theirs, ours = faces
    public = {name for name in theirs if name.rpartition(".")[2] not in NOT_PUBLIC}
    assert len(public) > 100
    assert public - set(ours) == set()


def test_every_signature_is_the_same(faces: tuple[dict[str, Any], dict[str, Any]]) -> None:
    theirs, ours = faces
    differing = {
        name: (expected, ours[name])
        for name, expected in theirs.items()
        if name in ours and isinstance(expected, list) and expected != ours[name]
    }
    assert differing == {}


def test_every_constant_and_class_member_is_the_same(faces: tuple[dict[str, Any], dict[str, Any]]) -> None:
    theirs, ours = faces
    for name, expected in theirs.items():
        if isinstance(expected, dict) and name in ours:
            for member, signature in expected.items():
                if member == "__init__" and name.endswith("Error"):
                    continue
                assert ours[name].get(member, signature) == signature, (name, member)
                assert member in ours[name] or member == "__init__", (name, member)
        if isinstance(expected, (int, str)):
            assert ours.get(name, expected) == expected, name

"""`dualdist doctor`: the options, and the diagnosis as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from dualdist.doctor import Availability, Diagnosis, diagnose, to_json
from dualdist.errors import UsageError
from dualdist.topology import Topology


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of this sub-command."""
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE as well, or to standard output alone for -")
    parser.epilog = "Exit code: 0 where nothing is wrong, 1 where something may fail, 2 where something will."


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; its exit code says how bad it is."""
    diagnosis = diagnose(os.environ)
    text = json.dumps(to_json(diagnosis), indent=1)
    if args.json == "-":
        sys.stdout.write(f"{text}\n")
        return diagnosis.exit_code
    if args.json is not None:
        _write(Path(args.json), text)
    sys.stdout.write("".join(f"{line}\n" for line in lines(diagnosis)))
    return diagnosis.exit_code


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The diagnosis for a person."""
    if diagnosis.topology is None:
        yield "place       unknown: the variables are broken, see below"
    else:
        yield from _place(diagnosis.topology)
    for name, backend in diagnosis.backends.items():
        yield f"{name:<12}{_state(backend)}"
    versions = ", ".join(f"{name} {version or 'none'}" for name, version in diagnosis.versions.items())
    yield f"{'versions':<12}{versions}"
    for finding in diagnosis.findings:
        yield ""
        yield f"{finding.level}: {finding.seen}"
        yield f"  why: {finding.why}"
        yield f"  do:  {finding.do}"


def _place(topology: Topology) -> Iterator[str]:
    def told(name: str) -> str:
        return f"{getattr(topology, name)}{' (inferred)' if name in topology.inferred else ''}"

    yield f"{'launcher':<12}{topology.launcher}"
    yield f"{'from':<12}{topology.source}"
    yield f"{'rank':<12}{topology.rank} of {topology.size}"
    yield f"{'local rank':<12}{told('local_rank')} of {told('local_size')}"
    yield f"{'node':<12}{told('node')} of {told('nodes')}"
    where = f" at {topology.address} port {topology.port}" if topology.address is not None else ""
    yield f"{'ranks meet':<12}{topology.meeting}{where}"


def _state(backend: Availability) -> str:
    built = [word for word, has in (("gloo", backend.gloo), ("mpi", backend.mpi), ("nccl", backend.nccl)) if has]
    state = "available" if backend.available else f"not available: {backend.reason}"
    return f"{state} (built with {', '.join(built)})" if built else state


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n")
    except OSError as error:
        raise UsageError(
            f"--json {path}: cannot write it ({error.strerror}); name another file, or - for stdout"
        ) from error

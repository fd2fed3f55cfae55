"""What the job scripts have in common: one block to edit at the top, and below it lines that need no change."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dualdist.schedulers.base import Request

FROM = "# ==== edit from here ===="
TO = "# ==== to here; what follows needs no change ===="
# On the host where it runs: prints a port that is free there.
FREE_PORT = "python3 -c 'import socket; s = socket.socket(); s.bind((\"\", 0)); print(s.getsockname()[1])'"
NOTE_PORT = "# This script runs on the first node: a port that is free here is free where the ranks meet."


def script(request: Request, where: str, directives: Sequence[str], block: Sequence[str], body: Sequence[str]) -> str:
    """The whole text; `where` names scheduler and launcher, `block` are variables beside program and setup."""
    ranks = f"{request.nodes} node{'s' * (request.nodes > 1)}, {request.tasks_per_node} rank{'s' * (request.tasks_per_node > 1)} each"
    lines = [
        "#!/bin/bash",
        f"# {where}: {ranks}. Made by `dualdist run --scheduler`, see launch/README.md.",
        "",
        FROM,
        *directives,
        *block,
        f"program=({shlex.join(request.program)})",
        *container(request),
        *setup(request),
        TO,
        "",
        "set -eo pipefail",
        *body,
    ]
    return "\n".join(lines) + "\n"


def setup(request: Request) -> list[str]:
    """A function that makes `python` the one with dualdist, and sets what ranks find in their environment."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in request.variables().items()]
    return ["setup() {", *(f"    {line}" for line in (*request.setup, *exports)), "}"]


def container(request: Request) -> list[str]:
    """The words before a program that Apptainer runs; --nv brings the GPUs and their driver in."""
    if request.container is None:
        return []
    nv = ["--nv"] if request.node_gpus else []
    return [f"container=({shlex.join(['apptainer', 'exec', *nv, request.container])})"]


def inside(request: Request) -> str:
    """What stands before the program in commands: the container, or nothing."""
    return '"${container[@]}" ' if request.container else ""


def python(request: Request) -> str:
    """The program on one rank."""
    return f'{inside(request)}python "${{program[@]}}"'


def agents(request: Request, nodes: str, job: str) -> list[str]:
    """torchrun's agent on one of several nodes, which meet at $head:$port."""
    return [
        f'{inside(request)}torchrun --nnodes="{nodes}" --nproc-per-node="$ranks_per_node"',
        f'--rdzv-backend=c10d --rdzv-id="{job}" --rdzv-endpoint="$head:$port"',
        '"${program[@]}"',
    ]


def standalone(request: Request) -> str:
    """torchrun on one node: it takes a free port of its own."""
    return f'{inside(request)}torchrun --standalone --nproc-per-node="$ranks_per_node" "${{program[@]}}"'


def mpirun(request: Request, ranks: str, *options: str) -> list[str]:
    """mpirun of Open MPI, MPICH or Intel MPI. By env, as they have no common option that hands variables over.

    Without --bind-to none a rank may have one core for all its threads.
    """
    given = ['PATH="$PATH"', 'LD_LIBRARY_PATH="$LD_LIBRARY_PATH"', *(f'{n}="${n}"' for n in request.variables())]
    words = [f'mpirun -n "{ranks}" --bind-to none', *options]
    return continued([" ".join(words), "env " + " ".join(given), python(request)])


def continued(lines: Sequence[str], indent: str = "    ") -> list[str]:
    """One command on several lines."""
    return [
        f"{indent if number else ''}{line}{'' if number == len(lines) - 1 else chr(32) + chr(92)}"
        for number, line in enumerate(lines)
    ]

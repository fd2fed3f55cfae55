"""What the job scripts have in common: one block to edit at the top, and below it lines that need no change."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from dualdist.errors import UsageError
from dualdist.launch.env_defaults import FORWARDED, FORWARDED_PREFIXES, LAUNCHER_NAMES, LAUNCHER_PREFIXES
from dualdist.launch.schedulers.request import ScriptRequest
from dualdist.utils.exit_codes import DONE, NOTICE, REQUEUE
from dualdist.utils.redaction import SECRET

EDIT_BEGIN = "# ==== edit from here ===="
EDIT_END = "# ==== to here; what follows needs no change ===="
# On the host where it runs: prints a port that is free there.
FREE_PORT = "python3 -c 'import socket; s = socket.socket(); s.bind((\"\", 0)); print(s.getsockname()[1])'"
# What may go to other hosts of the variables of a shell.
_PATTERNS = [*LAUNCHER_NAMES, *FORWARDED, *(f"{prefix}*" for prefix in (*LAUNCHER_PREFIXES, *FORWARDED_PREFIXES))]
_WRAPPED = textwrap.wrap(" | ".join(_PATTERNS), 100)
KEPT = [
    "# The launcher hands all variables that it has to all hosts: it gets those that concern a job.",
    f"secret={shlex.quote(SECRET)}",
    "kept=()",
    "for name in $(compgen -e); do",
    '    if [[ "${name^^}" =~ $secret ]]; then continue; fi',
    '    case "$name" in',
    *(f"        {line} \\" for line in _WRAPPED[:-1]),
    f"        {_WRAPPED[-1]})",
    '            kept+=("$name=${!name}")',
    "            ;;",
    "    esac",
    "done",
]
ALONE = 'env -i "${kept[@]}" "${variables[@]}"'
# What every shell does before a program.
START = ["setup", 'export "${variables[@]}"']
NOTE_SSH = "# horovodrun reaches the other nodes by ssh, which must not ask for a password."
NOTE_PORT = "# This script runs on the first node: a port that is free here is free where the ranks meet."


def script(
    request: ScriptRequest, where: str, directives: Sequence[str], block: Sequence[str], body: Sequence[str]
) -> str:
    """The whole text; `where` names scheduler and launcher, `block` are variables beside program and setup."""
    lines = [
        "#!/bin/bash",
        f"# {where}: {sizes(request)}. Made by `dualdist run --scheduler`, see launch/README.md.",
        "",
        EDIT_BEGIN,
        *directives,
        *block,
        f"program=({shlex.join(request.program)})",
        *_container(request),
        f"variables=({' '.join(_variables(request))}) # of every rank",
        "setup() { # makes python the one that has dualdist",
        *(f"    {line}" for line in request.setup or (":",)),
        "}",
        EDIT_END,
        "",
        "set -eo pipefail",
        *body,
    ]
    return "\n".join(lines) + "\n"


def _variables(request: ScriptRequest) -> Iterator[str]:
    yield from (shlex.quote(f"{name}={value}") for name, value in request.variables().items())
    yield from (f'"{name}=${{{name}?is not set where this was submitted}}"' for name in request.handed_on)


def sizes(request: ScriptRequest) -> str:
    """How many nodes and ranks, in words."""
    nodes = "1 node" if request.nodes == 1 else f"{request.nodes} nodes"
    ranks = "1 rank" if request.tasks_per_node == 1 else f"{request.tasks_per_node} ranks"
    return f"{nodes}, {ranks} on each"


def _container(request: ScriptRequest) -> list[str]:
    """The words before a program that Apptainer runs; --nv brings the GPUs and their driver in."""
    if request.container is None:
        return []
    nv = ["--nv"] if request.node_gpus else []
    return [f"container=({shlex.join(['apptainer', 'exec', *nv, request.container])})"]


def inside(request: ScriptRequest) -> str:
    """What stands before the program in commands: the container, or nothing."""
    return '"${container[@]}" ' if request.container else ""


def python(request: ScriptRequest) -> str:
    """The program on one rank."""
    return f'{inside(request)}python "${{program[@]}}"'


def standalone(request: ScriptRequest) -> str:
    """torchrun on one node: it takes a free port of its own."""
    return f'{inside(request)}torchrun --standalone --nproc-per-node="$ranks_per_node" "${{program[@]}}"'


def agents(request: ScriptRequest, nodes: str, job: str) -> list[str]:
    """torchrun's agent on one of several nodes, which meet at $head:$port."""
    return [
        f'{inside(request)}torchrun --nnodes="{nodes}" --nproc-per-node="$ranks_per_node"',
        f'--rdzv-backend=c10d --rdzv-id="{job}" --rdzv-endpoint="$head:$port"',
        '"${program[@]}"',
    ]


def agent_function(request: ScriptRequest, job: str) -> list[str]:
    """torchrun's agent as a function, and $told, the text by which a shell elsewhere knows it and what it needs."""
    first, *rest = agents(request, "$nodes", job)
    names = ["folder", "program", "variables", "nodes", "ranks_per_node", "head", "port"]
    names += ["container"] if request.container else []
    return [
        "# shellcheck disable=SC2329 # a shell on another host calls it",
        "agent() {",
        '    cd "$folder" || return',
        *(f"    {line}" for line in START),
        *(f"    {line}" for line in continued([f"exec {first}", *rest])),
        "}",
        "# Another host's shell sees no variables of this one: it is told what it needs.",
        f"told=\"$(declare -f setup agent; declare -p {' '.join(names)})\"'\n'agent".replace("'\n'", "$'\\n'"),
    ]


def awaited(start: Sequence[str]) -> list[str]:
    """Runs all that `start`, the lines of a loop, put into $pids to its end; the exit code is of one that failed."""
    return [
        "pids=()",
        *start,
        "code=0",
        'for pid in "${pids[@]}"; do',
        '    wait "$pid" || code=$?',
        "done",
        'exit "$code"',
    ]


def mpirun(request: ScriptRequest, ranks: str, *options: str) -> list[str]:
    """mpirun of Open MPI or MPICH. By env, as they have no option in common that hands variables over.

    Open MPI that is called by its full path finds its daemon on other hosts, whatever their PATH is. Without
    --bind-to none a rank may have one core for all its threads.
    """
    words = [f'"$(command -v mpirun)" -n "{ranks}" --bind-to none', *options]
    given = 'env PATH="$PATH" LD_LIBRARY_PATH="$LD_LIBRARY_PATH" "${variables[@]}"'
    return continued([" ".join(words), given, python(request)])


def horovodrun(request: ScriptRequest, ranks: str, *hosts: str) -> list[str]:
    """horovodrun over Gloo, which reaches other hosts by ssh."""
    if request.transport == "mpi":
        raise UsageError("horovodrun with the transport mpi runs mpirun: choose the launcher mpirun itself")
    alone = [*KEPT, f"{ALONE} \\"] if hosts else []
    indent = "    " * bool(hosts)
    lines = continued([" ".join([f'horovodrun --gloo -np "{ranks}"', *hosts]), python(request)])
    return [*alone, *(f"{indent}{line}" for line in lines)]


def continued(lines: Sequence[str]) -> list[str]:
    """One command on several lines."""
    last = len(lines) - 1
    return [f"{'    ' * bool(n)}{line}{' ' + chr(92) if n < last else ''}" for n, line in enumerate(lines)]


SIGNAL = "USR1"
FILE = f'"${NOTICE}"'
DONE_FILE = f'"${NOTICE}{DONE}"'
# Until the job ends, or a signal comes, or the clock has to be looked at.
BY_SIGNAL = ['    wait "$!" || true']
BY_CLOCK = ["    sleep 1", f'    [ "$SECONDS" -lt "$notice_after" ] || touch {FILE}']
END = f"exit {REQUEUE}"


def around(
    request: ScriptRequest, body: Sequence[str], folder: str, job: str, again: str, *, by_clock: bool = False
) -> list[str]:
    """The body of a script, run so that it can be told to stop, where that was requested; else as it is.

    `folder` is one that all nodes share, `job` names the job in it, and `again` is the command that queues the job
    again, or ends the script so that somebody does. With `by_clock` no signal comes: $notice_after says when to stop.
    """
    if request.requeue is None:
        return list(body)
    return [
        "# The ranks look for this file, save when it is there, and stop; then there is a second one beside it.",
        f'{NOTICE}="{folder}/.dualdist-stop-{job}"',
        f'variables+=("{NOTICE}=${NOTICE}")',
        f"rm -f {FILE} {DONE_FILE}",
        *([] if by_clock else [f"trap 'touch {FILE}' {SIGNAL}"]),
        "job() {",
        *(f"    {line}" for line in body),
        "}",
        "job &",
        'while kill -0 "$!" 2> /dev/null; do',
        *(BY_CLOCK if by_clock else BY_SIGNAL),
        "done",
        "code=0",
        'wait "$!" || code=$?',
        f'ls "{folder}" > /dev/null # so that NFS looks again',
        "stopped=",
        f"if [ -e {FILE} ] && [ -e {DONE_FILE} ]; then stopped=yes; fi",
        f"rm -f {FILE} {DONE_FILE}",
        f'if [ -n "$stopped" ]; then {again}; fi',
        'exit "$code"',
    ]

"""Hosts that are reached by ssh, without a scheduler."""

from __future__ import annotations

import shlex

from dualdist.errors import UsageError
from dualdist.schedulers import shell
from dualdist.schedulers.base import Request


def script(request: Request) -> str:
    """A script to run by hand, on the first of the hosts."""
    if len(request.hosts) != request.nodes:
        raise UsageError(f"{len(request.hosts)} hosts for {request.nodes} nodes: name each by -H host1:4,host2:4")
    block = [f"hosts=({shlex.join(request.hosts)})", f"ranks_per_node={request.tasks_per_node}", 'folder="$PWD"']
    start = {"torchrun": _torchrun, "mpirun": _mpirun, "horovodrun": _horovodrun}[request.launcher]
    return shell.script(request, f"Hosts by ssh, {request.launcher}", [], block, ["setup", *start(request)])


def _torchrun(request: Request) -> list[str]:
    carried = "folder program nodes ranks_per_node head port" + (" container" if request.container else "")
    agent = shell.agents(request, "$nodes", "$port")
    return [
        'nodes="${#hosts[@]}"',
        'head="${hosts[0]}"',
        "# Where the ranks meet must be free on the first host: run this script there.",
        f'port="$({shell.FREE_PORT})"',
        "agent() {",
        '    cd "$folder" || return',
        "    setup",
        *(f"    {line}" for line in shell.continued(["exec " + agent[0], *agent[1:]], "        ")),
        "}",
        "# ssh hands no variables on: the agent's shell is told what it needs. -tt ends it together with this script.",
        f'told="$(declare -f setup agent; declare -p {carried})"',
        "pids=()",
        'for host in "${hosts[@]}"; do',
        '    ssh -tt -o BatchMode=yes "$host" "bash -c $(printf %q "$told"$\'\\n\'agent)" < /dev/null &',
        "    pids+=($!)",
        "done",
        "trap 'kill \"${pids[@]}\" 2> /dev/null' EXIT",
        "code=0",
        'for pid in "${pids[@]}"; do',
        '    wait "$pid" || code=$?',
        "done",
        'exit "$code"',
    ]


def _slots() -> str:
    return 'slots="$(printf "%s:$ranks_per_node," "${hosts[@]}")"'


def _mpirun(request: Request) -> list[str]:
    ranks = "$((${#hosts[@]} * ranks_per_node))"
    return [_slots(), *shell.mpirun(request, ranks, '--host "${slots%,}"')]


def _horovodrun(request: Request) -> list[str]:
    ranks = "$((${#hosts[@]} * ranks_per_node))"
    return [_slots(), *shell.continued([f'horovodrun --gloo -np "{ranks}" -H "${{slots%,}}"', 'python "${program[@]}"'])]

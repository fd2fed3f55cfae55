"""Hosts that are reached by ssh, without a scheduler."""

from __future__ import annotations

import shlex

from dualdist.errors import UsageError
from dualdist.launch.schedulers import shell
from dualdist.launch.schedulers.request import ScriptRequest

# "host1:4,host2:4,", and how many that is.
SLOTS = 'slots="$(printf "%s:$ranks_per_node," "${hosts[@]}")"'
RANKS = "$((${#hosts[@]} * ranks_per_node))"


def script(request: ScriptRequest) -> str:
    """A script to run by hand, on the first of the hosts."""
    if len(request.hosts) != request.nodes:
        raise UsageError(f"{len(request.hosts)} hosts for {request.nodes} nodes: name each by -H host1:4,host2:4")
    block = [f"hosts=({shlex.join(request.hosts)})", f"ranks_per_node={request.tasks_per_node}", 'folder="$PWD"']
    start = {"torchrun": _torchrun, "mpirun": _mpirun, "horovodrun": _horovodrun}[request.launcher]
    return shell.script(request, f"Hosts by ssh, {request.launcher}", [], block, [*shell.START, *start(request)])


def _torchrun(request: ScriptRequest) -> list[str]:
    return [
        'nodes="${#hosts[@]}"',
        'head="${hosts[0]}"',
        f'port="$({shell.FREE_PORT})" # free on this host, which has to be the first',
        *shell.agent_function(request, "$port"),
        "# With a terminal (-tt) the far side ends together with this script.",
        *shell.awaited(
            [
                "trap 'kill \"${pids[@]}\" 2> /dev/null || true' EXIT",
                'for host in "${hosts[@]}"; do',
                '    ssh -tt -o BatchMode=yes "$host" "bash -c $(printf %q "$told")" < /dev/null &',
                "    pids+=($!)",
                "done",
            ]
        ),
    ]


def _mpirun(request: ScriptRequest) -> list[str]:
    first, *rest = shell.mpirun(request, RANKS, '--host "${slots%,}"')
    return [SLOTS, *shell.KEPT, f"{shell.ALONE} \\", f"    {first}", *(f"    {line}" for line in rest)]


def _horovodrun(request: ScriptRequest) -> list[str]:
    return [SLOTS, *shell.horovodrun(request, RANKS, '-H "${slots%,}"')]

"""One computer without a scheduler."""

from __future__ import annotations

from dualdist.errors import UsageError
from dualdist.launch.schedulers import shell
from dualdist.launch.schedulers.request import ScriptRequest


def script(request: ScriptRequest) -> str:
    """A script to run by hand."""
    if request.nodes != 1:
        raise UsageError(f"--nodes {request.nodes}: a workstation is one node; --scheduler ssh for several hosts")
    start = {
        "torchrun": [shell.standalone(request)],
        "mpirun": shell.mpirun(request, "$ranks_per_node"),
        "horovodrun": shell.horovodrun(request, "$ranks_per_node"),
    }[request.launcher]
    block = [f"ranks_per_node={request.tasks_per_node}"]
    return shell.script(request, f"A workstation, {request.launcher}", [], block, [*shell.START, *start])

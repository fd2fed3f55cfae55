"""jsrun of IBM's Job Step Manager, for job scripts: it needs resource sets, which the script for LSF computes."""

from collections.abc import Iterator

from dualdist.launch.launchers.base import Launcher
from dualdist.launch.script_request import ScriptRequest


def script_refusals(request: ScriptRequest) -> Iterator[str]:
    if request.memory_mib is not None:
        yield "--memory under jsrun: its jobs have whole nodes, with all their memory; leave it out"
    if request.node_gpus % request.tasks_per_node:
        yield (
            f"{request.node_gpus} GPUs for {request.tasks_per_node} tasks on each node: jsrun gives every rank the same"
        )


JSRUN = Launcher("jsrun", None, mpi="always", uses_allocation=True, script_refusals=script_refusals)

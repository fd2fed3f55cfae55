"""LSF: a script for bsub, whose ranks jsrun starts (IBM's Job Step Manager), or mpirun."""

from __future__ import annotations

from dualdist.errors import UsageError
from dualdist.launch.schedulers import shell
from dualdist.launch.schedulers import shell as notice
from dualdist.launch.schedulers.request import ScriptRequest, format_memory
from dualdist.utils.exit_codes import REQUEUE

# The ranks meet by a file in a folder that all nodes share: the script runs on another node than rank 0.
MEETING = 'export DUALDIST_RENDEZVOUS="file://$LS_SUBCWD/.dualdist-$LSB_JOBID"'


def script(request: ScriptRequest) -> str:
    """The text for bsub's standard input."""
    build = {"jsrun": _jsrun, "mpirun": _mpirun}[request.launcher]
    block = _resource_sets(request) if request.launcher == "jsrun" else []
    body = notice.around(request, build(request), "$LS_SUBCWD", "$LSB_JOBID", notice.END)
    return shell.script(request, f"LSF, {request.launcher}", _directives(request), block, body)


def _directives(request: ScriptRequest) -> list[str]:
    seconds, memory = request.seconds(), request.node_memory_mib()
    asked = [f"-J {request.title}", "-o %J.out"]
    if request.launcher == "jsrun":  # whole nodes, by the Cluster System Manager's option
        if memory is not None:
            raise UsageError("--memory under jsrun: its jobs have whole nodes, with all their memory; leave it out")
        asked.append(f"-nnodes {request.nodes}")
    else:
        asked += [f"-n {request.size}", f'-R "span[ptile={request.tasks_per_node}]"']
        asked.append(f'-R "affinity[core({request.cpus_per_task})]"')
        if request.node_gpus:
            asked.append(f'-gpu "num={request.node_gpus}:mode=shared"')
        if memory is not None:
            asked.append(f'-R "rusage[mem={format_memory(memory, giga="GB", mega="MB")}]"')
    if seconds is not None:
        minutes = -(-seconds // 60)
        asked.append(f"-W {minutes // 60}:{minutes % 60:02d}")
    if request.requeue is not None:
        asked += ["-r", f"-Q {REQUEUE}", f"-wa {notice.SIGNAL}", f"-wt {-(-request.requeue // 60)}"]
    asked += [f"-q {request.queue}"] * bool(request.queue) + [f"-P {request.account}"] * bool(request.account)
    return [f"#BSUB {words}" for words in asked]


def _resource_sets(request: ScriptRequest) -> list[str]:
    """One resource set for each rank, as jsrun's options -n, -r, -c and -g have them."""
    if request.node_gpus % request.tasks_per_node:
        raise UsageError(
            f"{request.node_gpus} GPUs for {request.tasks_per_node} tasks on each node: jsrun gives every rank the same"
        )
    return [
        f"ranks={request.size}",
        f"ranks_per_node={request.tasks_per_node}",
        f"cpus_per_rank={request.cpus_per_task}",
        f"gpus_per_rank={request.node_gpus // request.tasks_per_node}",
    ]


def _jsrun(request: ScriptRequest) -> list[str]:
    sets = 'jsrun --nrs "$ranks" --rs_per_host "$ranks_per_node" --tasks_per_rs 1'
    room = '--cpu_per_rs "$cpus_per_rank" --gpu_per_rs "$gpus_per_rank" --bind "packed:$cpus_per_rank"'
    return [*shell.START, MEETING, *shell.continued([sets, room, shell.python(request)])]


def _mpirun(request: ScriptRequest) -> list[str]:
    return [*shell.START, *shell.mpirun(request, "$LSB_DJOB_NUMPROC")]

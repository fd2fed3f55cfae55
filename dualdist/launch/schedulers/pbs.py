"""PBS Pro, OpenPBS and Torque: a script for qsub, whose ranks pbsdsh and torchrun, mpirun or horovodrun start."""

from __future__ import annotations

from dualdist.errors import UsageError
from dualdist.launch.schedulers import shell
from dualdist.launch.schedulers import shell as notice
from dualdist.launch.schedulers.request import ScriptRequest, format_clock, format_memory

# mpiprocs, the lines of a node in $PBS_NODEFILE, is how often pbsdsh starts a program there.
NODES = '$(sort -u "$PBS_NODEFILE" | wc -l)'
RANKS = '$(wc -l < "$PBS_NODEFILE")'
START = ['cd "$PBS_O_WORKDIR"', *shell.START]


def script(request: ScriptRequest) -> str:
    """The text for qsub."""
    build = {"torchrun": _torchrun, "mpirun": _mpirun, "horovodrun": _horovodrun}[request.launcher]
    ranks = [f"ranks_per_node={request.tasks_per_node}"] if request.launcher == "torchrun" else []
    body = notice.around(request, build(request), "$PBS_O_WORKDIR", "$PBS_JOBID", notice.END, by_clock=True)
    return shell.script(request, f"PBS, {request.launcher}", _directives(request), [*ranks, *_clock(request)], body)


def _clock(request: ScriptRequest) -> list[str]:
    """When the ranks are told to stop: PBS has no signal for that."""
    if request.requeue is None:
        return []
    seconds = request.seconds()
    if seconds is None:
        raise UsageError(f"--requeue {request.requeue} under PBS: its script looks at the clock; say --time, too")
    return [f"notice_after={seconds - request.requeue} # seconds; the rest of the walltime is for the checkpoint"]


def _directives(request: ScriptRequest) -> list[str]:
    tasks = 1 if request.launcher == "torchrun" else request.tasks_per_node
    cpus = request.cpus_per_task * request.tasks_per_node
    seconds, memory, gpus = request.seconds(), request.node_memory_mib(), request.node_gpus
    room = None if memory is None else format_memory(memory, giga="gb", mega="mb")
    chunk = [f"select={request.nodes}:ncpus={cpus}:mpiprocs={tasks}"]
    chunk += [f"ngpus={gpus}"] * bool(gpus) + [f"mem={room}"] * bool(room)
    # Torque counts in ppn what the nodefile lists, so that torchrun's agents are picked out of it below.
    torque = [f"nodes={request.nodes}:ppn={cpus if request.launcher == 'torchrun' else tasks}"]
    torque += [f"gpus={gpus}"] * bool(gpus)
    rerun = ["-r y"] * (request.requeue is not None)
    asked = [f"-N {request.title[:15]}", "-j oe", *rerun, f"-l {':'.join(chunk)}", "-l place=scatter"]
    if seconds is not None:
        asked.append(f"-l walltime={format_clock(seconds)}")
    asked += [f"-q {request.queue}"] * bool(request.queue) + [f"-A {request.account}"] * bool(request.account)
    asked += [f"-v {','.join(request.handed_on)}"] * bool(request.handed_on)  # else a job has none of qsub's variables
    lines = [f"#PBS {words}" for words in asked]
    return [
        *lines,
        "# Torque knows no select and place; there, instead of these two lines:",
        f"##PBS -l {':'.join(torque)}",
    ]


def _torchrun(request: ScriptRequest) -> list[str]:
    if request.nodes == 1:
        return [*START, shell.standalone(request)]
    return [
        *START,
        shell.NOTE_PORT,
        'head="$(hostname)"',
        f'port="$({shell.FREE_PORT})"',
        'folder="$PBS_O_WORKDIR"',
        f'nodes="{NODES}"',
        *shell.agent_function(request, "$PBS_JOBID"),
        "# pbsdsh counts the lines of the nodefile from 0: one agent for the first line of each host.",
        "mapfile -t slots < <(awk '!seen[$1]++ { print NR - 1 }' \"$PBS_NODEFILE\")",
        *shell.awaited(
            ['for slot in "${slots[@]}"; do', '    pbsdsh -n "$slot" -- bash -c "$told" &', "    pids+=($!)", "done"]
        ),
    ]


def _mpirun(request: ScriptRequest) -> list[str]:
    return [*START, *shell.mpirun(request, RANKS, '--machinefile "$PBS_NODEFILE"')]


def _horovodrun(request: ScriptRequest) -> list[str]:
    if request.nodes == 1:
        return [*START, *shell.horovodrun(request, RANKS)]
    return [
        *START,
        shell.NOTE_SSH,
        'hosts="$(sort "$PBS_NODEFILE" | uniq -c | awk \'{ printf "%s%s:%s", comma, $2, $1; comma = "," }\')"',
        *shell.horovodrun(request, RANKS, '-H "$hosts"'),
    ]

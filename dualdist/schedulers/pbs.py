"""PBS Pro, OpenPBS and Torque: a script for qsub, whose ranks pbsdsh and torchrun, mpirun or horovodrun start."""

from __future__ import annotations

from dualdist.errors import UsageError
from dualdist.schedulers import shell
from dualdist.schedulers.base import Request, amount, clock

# mpiprocs, the lines of a node in $PBS_NODEFILE, is how often pbsdsh starts a program there.
NODES = "$(sort -u \"$PBS_NODEFILE\" | wc -l)"
RANKS = "$(wc -l < \"$PBS_NODEFILE\")"
START = ["cd \"$PBS_O_WORKDIR\"", "setup"]


def script(request: Request) -> str:
    """The text for qsub."""
    build = {"torchrun": _torchrun, "mpirun": _mpirun, "horovodrun": _horovodrun}[request.launcher]
    ranks = [f"ranks_per_node={request.tasks_per_node}"] if request.launcher == "torchrun" else []
    return shell.script(request, f"PBS, {request.launcher}", _directives(request), ranks, build(request))


def _directives(request: Request) -> list[str]:
    tasks = 1 if request.launcher == "torchrun" else request.tasks_per_node
    cpus = request.cpus_per_task * request.tasks_per_node
    seconds, memory, gpus = request.seconds(), request.node_memory_mib(), request.node_gpus
    room = None if memory is None else amount(memory, giga="gb", mega="mb")
    chunk = [f"select={request.nodes}:ncpus={cpus}:mpiprocs={tasks}"]
    chunk += [f"ngpus={gpus}"] * bool(gpus) + [f"mem={room}"] * bool(room)
    # Torque counts in ppn what the nodefile lists, so that torchrun's agents are picked out of it below.
    torque = [f"nodes={request.nodes}:ppn={cpus if request.launcher == 'torchrun' else tasks}"]
    torque += [f"gpus={gpus}"] * bool(gpus)
    asked = [f"-N {request.title[:15]}", "-j oe", f"-l {':'.join(chunk)}", "-l place=scatter"]
    asked += [f"-l walltime={clock(seconds)}"] * (seconds is not None)
    asked += [f"-q {request.queue}"] * bool(request.queue) + [f"-A {request.account}"] * bool(request.account)
    lines = [f"#PBS {words}" for words in asked]
    return [*lines, "# Torque knows no select and place; there, instead of these two lines:", f"##PBS -l {':'.join(torque)}"]


def _torchrun(request: Request) -> list[str]:
    if request.nodes == 1:
        return [*START, shell.standalone(request)]
    agent = shell.continued(["exec " + shell.agents(request, "$nodes", "$PBS_JOBID")[0],
                             *shell.agents(request, "$nodes", "$PBS_JOBID")[1:]], "        ")
    carried = "folder program nodes ranks_per_node head port" + (" container" if request.container else "")
    return [
        *START,
        shell.NOTE_PORT,
        'head="$(hostname)"',
        f'port="$({shell.FREE_PORT})"',
        'folder="$PBS_O_WORKDIR"',
        f'nodes="{NODES}"',
        "agent() {",
        '    cd "$folder" || return',
        "    setup",
        *(f"    {line}" for line in agent),
        "}",
        "# pbsdsh hands no variables on: the agent's shell is told what it needs. One for each host of the nodefile.",
        f'told="$(declare -f setup agent; declare -p {carried})"',
        "pids=()",
        "for slot in $(awk '!seen[$1]++ { print NR - 1 }' \"$PBS_NODEFILE\"); do",
        '    pbsdsh -n "$slot" -- bash -c "$told"$\'\\n\'agent &',
        "    pids+=($!)",
        "done",
        "code=0",
        'for pid in "${pids[@]}"; do',
        '    wait "$pid" || code=$?',
        "done",
        'exit "$code"',
    ]


def _mpirun(request: Request) -> list[str]:
    return [*START, *shell.mpirun(request, RANKS, '--machinefile "$PBS_NODEFILE"')]


def _horovodrun(request: Request) -> list[str]:
    if request.transport == "mpi":
        raise UsageError("horovodrun with the transport mpi runs mpirun: choose the launcher mpirun itself")
    run = [f'horovodrun --gloo -np "{RANKS}"', 'python "${program[@]}"']
    if request.nodes == 1:
        return [*START, " ".join(run)]
    hosts = (
        'hosts="$(awk \'{ slots[$1]++ } END { for (host in slots) '
        '{ printf "%s%s:%s", separator, host, slots[host]; separator = "," } }\' "$PBS_NODEFILE")"'
    )
    return [*START, "# It reaches the other nodes by ssh, which must not ask for a password.", hosts,
            *shell.continued([run[0] + ' -H "$hosts"', run[1]])]

"""Slurm: a script for sbatch, whose ranks srun, torchrun, mpirun or horovodrun starts."""

from __future__ import annotations

from dualdist.launch.schedulers import shell
from dualdist.launch.schedulers import shell as notice
from dualdist.launch.schedulers.request import ScriptRequest, format_clock, format_memory

# Since 22.05 srun no longer takes --cpus-per-task from sbatch.
CPUS = 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
# Without the option Slurm waits for the other tasks when one has failed.
SRUN = "srun --kill-on-bad-exit=1"


def script(request: ScriptRequest) -> str:
    """The text for sbatch."""
    build = {"srun": _srun, "torchrun": _torchrun, "mpirun": _mpirun, "horovodrun": _horovodrun}[request.launcher]
    ranks = [f"ranks_per_node={request.tasks_per_node}"] if request.launcher == "torchrun" else []
    again = 'scontrol requeue "$SLURM_JOB_ID"'
    body = notice.around(request, build(request), "$SLURM_SUBMIT_DIR", "$SLURM_JOB_ID", again)
    return shell.script(request, f"Slurm, {request.launcher}", _directives(request), ranks, body)


def _directives(request: ScriptRequest) -> list[str]:
    agent = request.launcher == "torchrun"  # one task on each node, which starts the ranks
    tasks = 1 if agent else request.tasks_per_node
    cpus = request.cpus_per_task * (request.tasks_per_node if agent else 1)
    seconds, memory = request.seconds(), request.node_memory_mib()
    asked = {
        "job-name": request.title,
        "output": "%x-%j.out",
        "nodes": request.nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": cpus,
        "gpus-per-node": request.gpus_per_node or None,
        "gpus-per-task": request.gpus_per_task or None,
        "mem": None if memory is None else format_memory(memory, giga="G", mega="M"),
        "time": None if seconds is None else format_clock(seconds),
        "partition": request.queue,
        "account": request.account,
        # To this script alone.
        "signal": None if request.requeue is None else f"B:{notice.SIGNAL}@{request.requeue}",
        "open-mode": None if request.requeue is None else "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]
    return [*lines, *["#SBATCH --requeue"] * (request.requeue is not None)]


def _srun(request: ScriptRequest) -> list[str]:
    mpi = " --mpi=pmix" if "mpi" in (request.backend, request.transport) else ""
    return [*shell.START, CPUS, f"{SRUN}{mpi} {shell.python(request)}"]


def _torchrun(request: ScriptRequest) -> list[str]:
    if request.nodes == 1:
        return [*shell.START, shell.standalone(request)]
    return [
        *shell.START,
        CPUS,
        shell.NOTE_PORT,
        'head="$(hostname)"',
        f'port="$({shell.FREE_PORT})"',
        *shell.continued([SRUN, *shell.agents(request, "$SLURM_JOB_NUM_NODES", "$SLURM_JOB_ID")]),
    ]


def _mpirun(request: ScriptRequest) -> list[str]:
    return [*shell.START, *shell.mpirun(request, "$SLURM_NTASKS")]


def _horovodrun(request: ScriptRequest) -> list[str]:
    if request.nodes == 1:
        return [*shell.START, *shell.horovodrun(request, "$SLURM_NTASKS")]
    return [
        *shell.START,
        shell.NOTE_SSH,
        'hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" |',
        '    awk -v slots="$SLURM_NTASKS_PER_NODE" \'{ printf "%s%s:%s", comma, $1, slots; comma = "," }\')"',
        *shell.horovodrun(request, "$SLURM_NTASKS", '-H "$hosts"'),
    ]

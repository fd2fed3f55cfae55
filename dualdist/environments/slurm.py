"""Slurm: tasks of a step that srun started, not a batch script or a shell of salloc. PBS: pbsdsh is refused."""

import re
from collections.abc import Mapping
from dataclasses import replace

from dualdist.environments.env_values import (
    OVERRIDE,
    SHOWN,
    LauncherVariables,
    find_present,
    format_present,
    get_integer,
    get_value,
    read_topology,
    read_values,
    require_all,
)
from dualdist.errors import TopologyError
from dualdist.topology import Topology

STEP_IDS = ("SLURM_STEP_ID", "SLURM_STEPID")
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
NODE = "SLURM_NODEID"
NUM_NODES = "SLURM_STEP_NUM_NODES"
# Not SLURM_NTASKS, which is the size of the allocation.
VARIABLES = LauncherVariables(
    launcher="srun",
    command="srun -n N python script.py",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    node_rank=NODE,
    num_nodes=NUM_NODES,
)
NEEDED = (*VARIABLES.given(), TASKS_PER_NODE)
NODE_TASKS = "SLURM_GTIDS"
TERMINAL = "SLURM_PTY_PORT"
PMIX_NAMESPACE = "PMIX_NAMESPACE"
CRAY = "PALS_RANKID"
# PBS: the node's index in the job, and Torque's index of the slot; both are 0 in the batch script too.
PBS_VARIABLES = ("PBS_NODENUM", "PBS_VNODENUM")
# slurm.h: 0xfffffffa is the interactive step of salloc; above it are the batch script, the extern step etc.
FIRST_SPECIAL_STEP = 0xFFFFFFFA
STEP_ID = re.compile(r"[0-9]{1,10}")
COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """Read the variables of a task of a step.

    Without MASTER_ADDR and MASTER_PORT, or DUALDIST_RENDEZVOUS, the ranks meet by a file in a folder that all nodes
    share: rendezvous/address_exchange.py.
    """
    if not is_step(environ):
        _refuse_half_a_step(environ)
        return None
    require_all(environ, VARIABLES, (*find_present(environ, STEP_IDS)[:1], *NEEDED))
    node = read_values(environ, VARIABLES)["node_rank"]
    tasks = f"{TASKS_PER_NODE}[{node}]"
    return read_topology(
        {**environ, tasks: str(_tasks_on_node(environ, node))},
        replace(VARIABLES, local_size=tasks),
        rendezvous="slurm",
        mpi=started_with_pmix(environ) or get_value(environ, CRAY) is not None,
    )


def is_step(environ: Mapping[str, str]) -> bool:
    """Return True if this process is a task of a step that srun started, or was started by an MPI daemon that is one.

    Note [leftover step]: sbatch passes on the submitter's variables, so a script submitted from within a step sees
    that step's. It is recognised by Slurm listing one task on the script's node where the step had several.
    """
    name = next(iter(find_present(environ, STEP_IDS)), None)
    if name is None:
        return False
    value = get_value(environ, name) or ""
    if not STEP_ID.fullmatch(value):
        raise TopologyError(
            f"{name}={value[:SHOWN]!r}: expected a step's number; start with `{VARIABLES.command}`, or unset {name}"
        )
    if int(value) >= FIRST_SPECIAL_STEP:
        return False
    node = get_integer(environ, NODE)
    may_be_leftover = get_value(environ, NODE_TASKS) == "0" and get_value(environ, TASKS_PER_NODE) and node is not None
    return not may_be_leftover or _tasks_on_node(environ, node or 0) == 1


def is_shell(environ: Mapping[str, str]) -> bool:
    """Return True in a special step, such as that in which salloc runs a shell."""
    value = next((get_value(environ, name) for name in find_present(environ, STEP_IDS)), None) or ""
    return STEP_ID.fullmatch(value) is not None and int(value) >= FIRST_SPECIAL_STEP


def started_with_pmix(environ: Mapping[str, str]) -> bool:
    """Return True if srun --mpi=pmix started this process: variables of an mpirun are leftovers then."""
    return (get_value(environ, PMIX_NAMESPACE) or "").startswith("slurm.pmix.")


def refuse_leftover(environ: Mapping[str, str], topology: Topology, variables: LauncherVariables) -> None:
    """Raise TopologyError if srun started several tasks per node from within an mpirun of one rank.

    The step of an MPI daemon has one task per node, and a step with a terminal may run mpirun. In any other step
    mpirun's variables are inherited, and each task would become a job of one rank.
    """
    if topology.size > 1 or get_value(environ, TERMINAL) is not None or not is_step(environ):
        return
    tasks, nodes = get_integer(environ, VARIABLES.size), get_integer(environ, NUM_NODES)
    if tasks is not None and nodes is not None and tasks > nodes:
        raise TopologyError(
            f"{format_present(environ, (variables.rank, variables.size))}, but "
            f"{format_present(environ, VARIABLES.given())}: mpirun says one rank, srun {tasks}; "
            f"`unset {' '.join(variables.given())}` before srun if srun starts the ranks, or set {OVERRIDE}"
        )


def _refuse_half_a_step(environ: Mapping[str, str]) -> None:
    """Raise TopologyError if a step's ID is missing: its task would become a job of one rank."""
    has_task = get_value(environ, VARIABLES.size) is not None or (get_integer(environ, VARIABLES.rank) or 0) > 0
    if has_task and not find_present(environ, STEP_IDS):
        require_all(environ, VARIABLES, (STEP_IDS[0], *NEEDED))


def _tasks_on_node(environ: Mapping[str, str], node: int) -> int:
    """Return the number of tasks on the node: "2(x2),1" is 2, 2 and 1."""
    value = get_value(environ, TASKS_PER_NODE) or ""
    end = 0
    for item in value.split(","):
        match = COUNT.fullmatch(item.strip())
        if match is None or int(match[1]) < 1:
            raise TopologyError(
                f'{TASKS_PER_NODE}={value[:SHOWN]!r}: expected counts such as "2(x2),1"; '
                f"start with `{VARIABLES.command}`"
            )
        end += int(match[2] or 1)
        if node < end:
            return int(match[1])
    raise TopologyError(
        f"{NODE}={node} but {TASKS_PER_NODE}={value[:SHOWN]!r} has {end} nodes: a node's index must be below that; "
        f"start with `{VARIABLES.command}`, or set {OVERRIDE}"
    )


def refuse_pbsdsh(environ: Mapping[str, str]) -> Topology | None:
    """Raise TopologyError on other nodes than a PBS batch script's, where only pbsdsh starts processes; else None.

    pbsdsh of PBS Pro and Torque gives its tasks no size: each would silently become a job of one rank.
    """
    if any(get_integer(environ, name) for name in PBS_VARIABLES):
        raise TopologyError(
            f"{format_present(environ, find_present(environ, PBS_VARIABLES))}: pbsdsh started this process, and no "
            "variable gives the number of ranks: let pbsdsh start torchrun, one per node (dualdist run "
            f"--scheduler pbs writes that), or use mpirun, or set {OVERRIDE}"
        )
    return None

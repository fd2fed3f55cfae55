"""Slurm: a task of a real step, which srun started. A batch script or a shell of salloc is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dualdist.environments.env_values import (
    OVERRIDE,
    SHOWN,
    LauncherVariables,
    check_bounds,
    find_set,
    format_set,
    get_integer,
    get_value,
    read_values,
    require_all,
)
from dualdist.environments.infer_topology import get_main_address, infer_topology
from dualdist.errors import TopologyError
from dualdist.topology import Topology

STEP_IDS = ("SLURM_STEP_ID", "SLURM_STEPID")
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
NODE = "SLURM_NODEID"
# The size is never SLURM_NTASKS, which speaks of the allocation.
VARIABLES = LauncherVariables(
    launcher="srun",
    command="srun -n N python script.py",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    node_rank=NODE,
    num_nodes="SLURM_STEP_NUM_NODES",
)
NEEDED = (*VARIABLES.given(), TASKS_PER_NODE)
NODE_TASKS = "SLURM_GTIDS"
TERMINAL = "SLURM_PTY_PORT"
PMIX_NAMESPACE = "PMIX_NAMESPACE"
CRAY = "PALS_RANKID"
# slurm.h: 0xfffffffa is the interactive step of salloc; above it are the batch script, the extern step and their like.
FIRST_UNREAL_STEP = 0xFFFFFFFA
STEP_ID = re.compile(r"[0-9]{1,10}")
COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The task's place in its step; the ranks meet by a file in a folder that all nodes share."""
    if not is_step(environ):
        _refuse_half_a_step(environ)
        return None
    require_all(environ, VARIABLES, (*find_set(environ, STEP_IDS)[:1], *NEEDED))
    told = read_values(environ, VARIABLES)
    assert told.node_rank is not None
    told = replace(told, local_size=_tasks_on(environ, told.node_rank))
    names = replace(VARIABLES, local_size=f"{TASKS_PER_NODE}[{told.node_rank}]")
    check_bounds(told, names)
    return infer_topology(
        told,
        names=names,
        launcher="srun",
        source=f"{', '.join(NEEDED)} (srun)",
        master=get_main_address(environ),
        rendezvous="slurm",
        mpi=started_with_pmix(environ) or get_value(environ, CRAY) is not None,
    )


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a step that srun started: a task of it, or started by an MPI daemon that is one.

    Note [leftover step]: sbatch hands the submitter's variables on, so that a script submitted from within a step
    sees that step as its own. It gives itself away: Slurm lists one task on the script's node, the step had several.
    """
    name = next(iter(find_set(environ, STEP_IDS)), None)
    if name is None:
        return False
    value = get_value(environ, name) or ""
    if not STEP_ID.fullmatch(value):
        raise TopologyError(
            f"{name}={value[:SHOWN]!r}: expected a step's number; start with `{VARIABLES.command}`, or unset {name}"
        )
    if int(value) >= FIRST_UNREAL_STEP:
        return False
    node = get_integer(environ, NODE)
    leftover = get_value(environ, NODE_TASKS) == "0" and get_value(environ, TASKS_PER_NODE) and node is not None
    return not leftover or _tasks_on(environ, node or 0) == 1


def is_shell(environ: Mapping[str, str]) -> bool:
    """Whether this is the step in which salloc runs a shell."""
    value = next((get_value(environ, name) for name in find_set(environ, STEP_IDS)), None) or ""
    return STEP_ID.fullmatch(value) is not None and int(value) >= FIRST_UNREAL_STEP


def started_with_pmix(environ: Mapping[str, str]) -> bool:
    """Whether srun --mpi=pmix itself started this process: the variables of any mpirun are then left over."""
    return (get_value(environ, PMIX_NAMESPACE) or "").startswith("slurm.pmix.")


def refuse_leftover(environ: Mapping[str, str], found: Topology, names: LauncherVariables) -> None:
    """Raise a TopologyError where srun started several tasks on a node from within an mpirun of one rank.

    The step of an MPI daemon has one task a node, and a step that serves a terminal may well run mpirun. In any other
    step the variables of mpirun are inherited, and each task would take itself for a job of one.
    """
    if found.size > 1 or get_value(environ, TERMINAL) is not None or not is_step(environ):
        return
    tasks, nodes = get_integer(environ, VARIABLES.size), get_integer(environ, "SLURM_STEP_NUM_NODES")
    if tasks is not None and nodes is not None and tasks > nodes:
        raise TopologyError(
            f"{format_set(environ, (names.rank, names.size))}, but {format_set(environ, VARIABLES.given())}: "
            f"mpirun says one rank, srun {tasks}; "
            f"`unset {' '.join(names.given())}` before srun if srun starts the ranks, or set {OVERRIDE}"
        )


def _refuse_half_a_step(environ: Mapping[str, str]) -> None:
    """Raise a TopologyError where a task of a step has lost its step's number: else it would be a job of one."""
    lost = get_value(environ, VARIABLES.size) is not None or (get_integer(environ, VARIABLES.rank) or 0) > 0
    if lost and not find_set(environ, STEP_IDS):
        require_all(environ, VARIABLES, (STEP_IDS[0], *NEEDED))


def _tasks_on(environ: Mapping[str, str], node: int) -> int:
    """The number of tasks on the node: "2(x2),1" is 2, 2 and 1."""
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

"""Slurm: a task of a real step, which srun started. A batch script or a shell of salloc is none."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dualdist.environments.master import read_master
from dualdist.environments.place import topology
from dualdist.environments.variables import OVERRIDE, SHOWN, Names, Told, check, integer, require, shown, text
from dualdist.errors import TopologyError
from dualdist.topology import Topology

STEP_IDS = ("SLURM_STEP_ID", "SLURM_STEPID")
RANK = "SLURM_PROCID"
SIZE = "SLURM_STEP_NUM_TASKS"  # never SLURM_NTASKS, which speaks of the allocation
LOCAL_RANK = "SLURM_LOCALID"
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
NODE = "SLURM_NODEID"
NODES = "SLURM_STEP_NUM_NODES"
NEEDED = (RANK, SIZE, LOCAL_RANK, TASKS_PER_NODE, NODE, NODES)
NAMES = Names(rank=RANK, size=SIZE, local_rank=LOCAL_RANK, local_size=TASKS_PER_NODE, node=NODE, nodes=NODES)
NODE_TASKS = "SLURM_GTIDS"
TERMINAL = "SLURM_PTY_PORT"
PMIX_NAMESPACE = "PMIX_NAMESPACE"
CRAY = "PALS_RANKID"
COMMAND = "srun -n N python script.py"
# slurm.h: 0xfffffffa is the interactive step of salloc; above it are the batch script, the extern step and their like.
FIRST_UNREAL_STEP = 0xFFFFFFFA
STEP_ID = re.compile(r"[0-9]{1,10}")
COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The task's place in its step; the ranks meet by a file in a folder that all nodes share."""
    if not is_step(environ):
        _refuse_half_a_step(environ)
        return None
    require(environ, NEEDED, "srun", COMMAND)
    node = integer(environ, NODE)
    assert node is not None
    told = Told(
        rank=integer(environ, RANK) or 0,
        size=integer(environ, SIZE) or 0,
        local_rank=integer(environ, LOCAL_RANK),
        local_size=_tasks_on(environ, node),
        node=node,
        nodes=integer(environ, NODES),
    )
    if told.rank >= told.size > 0:
        raise TopologyError(
            f"{RANK}={told.rank} but {SIZE}={told.size}: a rank must be below the size; was this started with srun? "
            f"Start it with `{COMMAND}`, or set {OVERRIDE}"
        )
    check(told, NAMES)
    return topology(
        told,
        launcher="srun",
        source=f"{', '.join(NEEDED)} (srun)",
        master=read_master(environ),
        meeting="slurm",
        mpi=started_mpi(environ) or text(environ, CRAY) is not None,
    )


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether a step of srun is this process's own, or the step of the MPI daemon that started it.

    Note [leftover step]: sbatch hands the submitter's variables on, so that a script submitted from within a step sees a step
    that is not its own. It gives itself away: Slurm counts one task on the script's node, the step counted several.
    """
    value = next((value for name in STEP_IDS if (value := text(environ, name))), None)
    if value is None:
        return False
    if not STEP_ID.fullmatch(value):
        raise TopologyError(
            f"{STEP_IDS[0]}={value[:SHOWN]!r}: expected a step's number; start with `{COMMAND}`, or unset it"
        )
    if int(value) >= FIRST_UNREAL_STEP:
        return False
    if text(environ, NODE_TASKS) == "0" and text(environ, TASKS_PER_NODE):
        node = integer(environ, NODE)
        return node is None or _tasks_on(environ, node) == 1
    return True


def started_mpi(environ: Mapping[str, str]) -> bool:
    """Whether srun itself started this process with PMIx: the variables of any mpirun are then left over from outside."""
    return (text(environ, PMIX_NAMESPACE) or "").startswith("slurm.pmix.")


def refuse_leftover(environ: Mapping[str, str], told: Told, names: Names) -> None:
    """Raise a TopologyError where srun started several tasks on a node from within an mpirun of one rank.

    An MPI daemon's step has one task a node, and a step that serves a terminal may well run mpirun; any other step inherited
    the variables of mpirun, and its tasks would each take themselves for a job of one.
    """
    if told.size > 1 or text(environ, TERMINAL) is not None or not is_step(environ):
        return
    tasks, nodes = integer(environ, SIZE), integer(environ, NODES)
    if tasks is not None and nodes is not None and tasks > nodes:
        raise TopologyError(
            f"{shown(environ, (names.rank, names.size))}, but {shown(environ, (RANK, SIZE, NODES))}: mpirun says one rank and "
            f"srun {tasks}; unset {' '.join(names.given())} before srun if srun starts the ranks, or set {OVERRIDE}"
        )


def _refuse_half_a_step(environ: Mapping[str, str]) -> None:
    """Raise a TopologyError where a task of a step has lost its step's number: else it would be a job of one."""
    if any(text(environ, name) for name in STEP_IDS):
        return
    if text(environ, SIZE) is not None or (integer(environ, RANK) or 0) > 0:
        require(environ, (STEP_IDS[0], RANK, SIZE), "srun", COMMAND)


def _tasks_on(environ: Mapping[str, str], node: int) -> int:
    """The number of tasks on the node: "2(x2),1" is 2, 2 and 1."""
    value = text(environ, TASKS_PER_NODE) or ""
    end = 0
    for item in value.split(","):
        match = COUNT.fullmatch(item.strip())
        if match is None or int(match[1]) < 1:
            raise TopologyError(
                f'{TASKS_PER_NODE}={value[:SHOWN]!r}: expected counts such as "2(x2),1"; start with `{COMMAND}`'
            )
        end += int(match[2] or 1)
        if node < end:
            return int(match[1])
    raise TopologyError(
        f"{NODE}={node} but {TASKS_PER_NODE}={value[:SHOWN]!r} counts {end} nodes: a node's index must be below that; "
        f"start with `{COMMAND}`, or set {OVERRIDE}"
    )

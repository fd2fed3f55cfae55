"""Launcher detection: one function per launcher, from environment variables to a Topology, tried in ORDER.

To add one, write its function in a module of this package, and a Detection in ORDER; dualdist/launch/launchers is for
starting ranks. Importing this package reads nothing and loads neither torch nor MPI.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from dualdist.environments import horovodrun, mpi, slurm, torchrun
from dualdist.environments.env_values import MASTER, find_present, get_value, require_agreement
from dualdist.topology import Topology


@dataclass(frozen=True)
class Detection:
    """Detection of one launcher: its variables, and why they take precedence over those of later launchers."""

    launcher: str
    detect: Callable[[Mapping[str, str]], Topology | None]
    variables: tuple[str, ...]
    precedence: str = ""


# The variables that `dualdist exec` has set in this process, as JSON.
EXEC_VARIABLES = "DUALDIST_EXEC"
DAEMON_STEP = "mpirun's ranks inherit the Slurm step of the daemon that started them"
ORDER = (
    Detection(
        "the override",
        torchrun.detect_override,
        (*torchrun.OVERRIDE_VARIABLES.given(), *torchrun.OVERRIDE_ADDRESS),
        "DUALDIST_RANK takes precedence over launchers",
    ),
    Detection(
        "torchrun",
        torchrun.detect_torchrun,
        (*torchrun.VARIABLES.given(), "ROLE_RANK", "ROLE_WORLD_SIZE"),
        "torchrun is the innermost launcher: srun and mpirun start its agents, one per node",
    ),
    Detection(
        "horovodrun",
        horovodrun.detect,
        horovodrun.RANK_VARIABLES,
        "horovodrun starts its ranks over ssh, also from within a job",
    ),
    Detection("jsrun", mpi.detect_jsm, mpi.JSM.given(), "jsrun's MPI also sets Open MPI's variables"),
    Detection(
        "MVAPICH2",
        partial(mpi.read_mpirun, variables=mpi.MVAPICH),
        mpi.MVAPICH.given(),
        "MVAPICH2's mpiexec is a Hydra with additional variables",
    ),
    Detection(
        "Open MPI",
        mpi.detect_openmpi,
        (*mpi.OPENMPI.given(), "OMPI_COMM_WORLD_NODE_RANK", "OMPI_UNIVERSE_SIZE"),
        DAEMON_STEP,
    ),
    Detection(
        "PALS",
        mpi.detect_pals,
        (*mpi.PALS_ONLY, *mpi.PALS_LOCAL_RANKS, *mpi.PALS_LOCAL_SIZES),
        "it may set Hydra's local ranks",
    ),
    Detection("MPICH or Intel MPI", mpi.detect_hydra, mpi.HYDRA.given(), DAEMON_STEP),
    Detection("Flux", mpi.detect_flux, mpi.FLUX.given(), "a Flux instance may run as a Slurm step"),
    Detection(
        "srun",  # a task of a step, not a batch script or a shell
        slurm.detect,
        (*slurm.NEEDED, *slurm.STEP_IDS),
        "srun started this process; the others are left over",
    ),
    # After all launchers that set PMI_RANK and more specific variables.
    Detection("PMI", mpi.detect_pmi, ("PMIX_RANK",)),
    # Without a launcher: RANK and WORLD_SIZE; pbsdsh, which numbers its tasks, but gives no size; no variables at all.
    Detection("a shared address", torchrun.detect_env, MASTER),
    Detection("pbsdsh", slurm.refuse_pbsdsh, slurm.PBS_VARIABLES),
    Detection("none", torchrun.detect_single, ()),
)


def detect(environ: Mapping[str, str]) -> Topology:
    """Return this process's Topology, from `environ` alone.

    Raises:
        TopologyError: The variables are incomplete, impossible or contradict each other. They never silently
            result in a job of one rank.
    """
    environ = without_exec(environ)
    for detection in ORDER:
        topology = detection.detect(environ)
        if topology is not None:
            if detection.detect is not torchrun.detect_override:  # the user's answer to any disagreement
                require_agreement(environ, topology, torchrun.VARIABLES)
            return topology
    raise AssertionError("detect_single always returns a Topology")


def set_by_exec(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `dualdist exec` set and nothing has changed; none in the ranks of an inner torchrun."""
    try:
        values = dict(json.loads(environ.get(EXEC_VARIABLES, "{}")))
    except (ValueError, TypeError, RecursionError):
        return {}
    if environ.get(torchrun.RUN_ID) != values.get(torchrun.RUN_ID):
        return {}
    return {name: value for name, value in values.items() if environ.get(name) == value}


def without_exec(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables without those of `dualdist exec`, so that dualdist finds its launcher as without it."""
    values = set_by_exec(environ)
    return {name: value for name, value in environ.items() if name not in values} if values else environ


@dataclass(frozen=True)
class UnusedVariable:
    """A variable that is set, and why it was not used."""

    name: str
    value: str
    why: str


OTHER_ALLOCATION = "it counts the {0} of the allocation, not of this step"
HOST_LIST = "the list need not follow the order of the ranks"
# Never used, whatever the launcher.
NEVER = {
    "HOROVOD_CROSS_RANK": "it counts only hosts that have this local rank, so on unequal hosts it is not the node rank",
    "HOROVOD_CROSS_SIZE": "it counts only hosts that have this local rank, so on unequal hosts it is too small",
    "OMPI_COMM_WORLD_NODE_RANK": "it numbers the processes of this node, not the nodes",
    "OMPI_UNIVERSE_SIZE": "it counts slots, not ranks",
    "PMIX_RANK": "no variable gives a size with it: PMIx passes that to MPI alone",
    "ROLE_RANK": "it is the rank within torchrun's role; RANK is the job's",
    "ROLE_WORLD_SIZE": "it is the size of torchrun's role; WORLD_SIZE is the job's",
    "SLURM_NTASKS": OTHER_ALLOCATION.format("tasks"),
    "SLURM_NPROCS": OTHER_ALLOCATION.format("tasks"),
    "SLURM_TASKS_PER_NODE": OTHER_ALLOCATION.format("tasks per node"),
    "SLURM_NNODES": OTHER_ALLOCATION.format("nodes"),
    "SLURM_JOB_NUM_NODES": OTHER_ALLOCATION.format("nodes"),
    "SLURM_JOB_NODELIST": HOST_LIST,
    "SLURM_STEP_NODELIST": HOST_LIST,
    "SLURM_NODELIST": HOST_LIST,
    "SLURM_LAUNCH_NODE_IPADDR": "it is the host where srun was typed, which need not be rank 0's",
    "NODE_RANK": "it is an option of launchers, not set by them",
}
ALL_VARIABLES = tuple(dict.fromkeys([*(name for each in ORDER for name in each.variables), *NEVER]))
NOT_A_TASK = "this process is no task of a Slurm step: batch scripts and shells have this variable too"
LEFT_OVER = "of the step from which this batch script was submitted; Slurm lists one task on its node"
BY_EXEC = "dualdist exec set it for the program, from this topology"
INCOMPLETE = "it is not used without {0}"


def find_unused(environ: Mapping[str, str], topology: Topology) -> Iterator[UnusedVariable]:
    """Yield every launcher variable that is set and was not used for the topology."""
    used = {name.partition("[")[0] for _, name in topology.origins}
    ours = set_by_exec(environ)
    yield from (UnusedVariable(name, value, BY_EXEC) for name, value in ours.items())
    environ = without_exec(environ)
    if topology.launcher == "srun":
        used |= set(slurm.STEP_IDS)  # no field's value, but they show that this is a step
    winner = next((each for each in ORDER if used & set(each.variables) - set(MASTER)), None)
    for name in ALL_VARIABLES:
        if name not in used and (value := get_value(environ, name)) is not None:
            yield UnusedVariable(name, value, _reason(name, winner, environ))


def find_all_set(environ: Mapping[str, str]) -> list[str]:
    return find_present(environ, ALL_VARIABLES)


def _reason(name: str, winner: Detection | None, environ: Mapping[str, str]) -> str:
    family = next((each for each in ORDER if name in each.variables), None)
    if name in NEVER:
        return NEVER[name]
    if name in MASTER:
        other = MASTER[1 - MASTER.index(name)]
        return INCOMPLETE.format(other) if get_value(environ, other) is None else "there is only one rank"
    if name.startswith("SLURM") and (not find_present(environ, slurm.STEP_IDS) or slurm.is_shell(environ)):
        return NOT_A_TASK
    if winner is not None and family is not None and family is not winner:
        return winner.precedence or f"{winner.launcher} started this process"
    if winner is not None:
        return f"other variables of {winner.launcher} give the topology"
    if name.startswith("SLURM"):
        return LEFT_OVER
    if family is not None and len(family.variables) > 2:
        return INCOMPLETE.format(" and ".join(family.variables[:2]))
    return "it gives neither a rank nor a size"

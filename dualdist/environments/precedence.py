"""Precedence of launcher variables: those that are set but not used for the topology, and the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dualdist.environments import explicit, horovodrun, mpi, pbs, slurm, torchrun
from dualdist.environments.env_values import find_present, get_value
from dualdist.environments.infer_topology import MASTER
from dualdist.topology import Topology


@dataclass(frozen=True)
class LauncherFamily:
    """The variables of one launcher, and why they take precedence over later families in FAMILIES."""

    launcher: str
    variables: tuple[str, ...]
    precedence: str


@dataclass(frozen=True)
class UnusedVariable:
    """A variable that is set, and why it was not used."""

    name: str
    value: str
    why: str


DAEMON_STEP = "mpirun's ranks inherit the Slurm step of the daemon that started them"
# In the order of dualdist.environments.ORDER.
FAMILIES = (
    LauncherFamily(
        "the override",
        (*explicit.VARIABLES.given(), *explicit.MAIN_ADDRESS),
        "DUALDIST_RANK takes precedence over launchers",
    ),
    LauncherFamily(
        "torchrun",
        (*torchrun.VARIABLES.given(), "ROLE_RANK", "ROLE_WORLD_SIZE"),
        "torchrun is the innermost launcher: srun and mpirun start its agents, one per node",
    ),
    LauncherFamily(
        "horovodrun", horovodrun.RANK_VARIABLES, "horovodrun starts its ranks over ssh, also from within a job"
    ),
    LauncherFamily("jsrun", tuple(mpi.JSM.given()), "jsrun's MPI also sets Open MPI's variables"),
    LauncherFamily("MVAPICH2", tuple(mpi.MVAPICH.given()), "MVAPICH2's mpiexec is a Hydra with additional variables"),
    LauncherFamily("Open MPI", (*mpi.OPENMPI.given(), "OMPI_COMM_WORLD_NODE_RANK", "OMPI_UNIVERSE_SIZE"), DAEMON_STEP),
    LauncherFamily(
        "PALS", (*mpi.PALS_ONLY, *mpi.PALS_LOCAL_RANKS, *mpi.PALS_LOCAL_SIZES), "it may set Hydra's local ranks"
    ),
    LauncherFamily("MPICH or Intel MPI", tuple(mpi.HYDRA.given()), DAEMON_STEP),
    LauncherFamily("Flux", tuple(mpi.FLUX.given()), "a Flux instance may run as a Slurm step"),
    LauncherFamily("srun", (*slurm.NEEDED, *slurm.STEP_IDS), "srun started this process; the others are left over"),
    LauncherFamily("PMI", ("PMIX_RANK",), ""),
    LauncherFamily("a shared address", MASTER, ""),
    LauncherFamily("pbsdsh", pbs.RANK_VARIABLES, ""),
)
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
ALL = tuple(dict.fromkeys([*(name for family in FAMILIES for name in family.variables), *NEVER]))
NOT_A_TASK = "this process is no task of a Slurm step: batch scripts and shells have this variable too"
LEFT_OVER = "of the step from which this batch script was submitted; Slurm lists one task on its node"
INCOMPLETE = "it is not used without {0}"


def find_unused(environ: Mapping[str, str], topology: Topology) -> Iterator[UnusedVariable]:
    """Yield every launcher variable that is set and was not used for the topology."""
    used = {name.partition("[")[0] for _, name in topology.origins}
    if topology.launcher == "srun":
        used |= set(slurm.STEP_IDS)  # no field's value, but they show that this is a step
    winner = next((family for family in FAMILIES if used & set(family.variables) - set(MASTER)), None)
    for name in ALL:
        if name not in used and (value := get_value(environ, name)) is not None:
            yield UnusedVariable(name, value, _reason(name, winner, environ))


def find_all_set(environ: Mapping[str, str]) -> list[str]:
    """Return the names of all launcher variables that are set."""
    return find_present(environ, ALL)


def _reason(name: str, winner: LauncherFamily | None, environ: Mapping[str, str]) -> str:
    family = next((family for family in FAMILIES if name in family.variables), None)
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

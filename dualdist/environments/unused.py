"""Which variables that launchers set were not used for a topology, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dualdist.environments import flux, horovodrun, hydra, jsm, mvapich, openmpi, override, pals, pbs, slurm, torchrun
from dualdist.environments.env_values import find_set, get_value
from dualdist.environments.infer_topology import MASTER
from dualdist.topology import Topology


@dataclass(frozen=True)
class LauncherFamily:
    """What one launcher sets. `first` says why its word counts where another one's is there, too."""

    launcher: str
    names: tuple[str, ...]
    first: str


@dataclass(frozen=True)
class UnusedVariable:
    """A variable that is set, and why it did not count."""

    name: str
    value: str
    why: str


# In the order of dualdist.environments.ORDER.
FAMILIES = (
    LauncherFamily(
        "an explicit place", (*override.VARIABLES.given(), *override.MEETING), "your own word goes before a launcher's"
    ),
    LauncherFamily(
        "torchrun",
        (*torchrun.VARIABLES.given(), "ROLE_RANK", "ROLE_WORLD_SIZE"),
        "torchrun is the innermost launcher: srun and mpirun start its agents, one a node",
    ),
    LauncherFamily("horovodrun", horovodrun.PLACE, "horovodrun starts its ranks over ssh, from within a job as well"),
    LauncherFamily("jsrun", tuple(jsm.VARIABLES.given()), "jsrun's MPI sets Open MPI's variables, too"),
    LauncherFamily(
        "MVAPICH2", tuple(mvapich.VARIABLES.given()), "MVAPICH2's mpiexec is a Hydra with variables of its own"
    ),
    LauncherFamily(
        "Open MPI",
        (*openmpi.VARIABLES.given(), "OMPI_COMM_WORLD_NODE_RANK", "OMPI_UNIVERSE_SIZE"),
        "mpirun's ranks inherit the Slurm step of the daemon that started them",
    ),
    LauncherFamily("PALS", (*pals.OWN, *pals.LOCAL_RANKS, *pals.LOCAL_SIZES), "PALS may set Hydra's local ranks, too"),
    LauncherFamily(
        "MPICH or Intel MPI",
        tuple(hydra.VARIABLES.given()),
        "mpirun's ranks inherit the Slurm step of the daemon that started them",
    ),
    LauncherFamily("Flux", tuple(flux.VARIABLES.given()), "an instance of Flux may run as a Slurm step"),
    LauncherFamily(
        "srun", (*slurm.NEEDED, *slurm.STEP_IDS), "srun itself started this process; the rest was left over"
    ),
    LauncherFamily("PMI", ("PMIX_RANK",), ""),
    LauncherFamily("a shared address", MASTER, ""),
    LauncherFamily("pbsdsh", pbs.PLACE, ""),
)
# Whatever launcher it was, these say something else than their names suggest.
NEVER = {
    "HOROVOD_CROSS_RANK": "it counts only the hosts that have this local rank, so that on unequal hosts it is no node",
    "HOROVOD_CROSS_SIZE": "it counts only the hosts that have this local rank, so that on unequal hosts it is too few",
    "OMPI_COMM_WORLD_NODE_RANK": "it numbers the processes of this node, not the nodes",
    "OMPI_UNIVERSE_SIZE": "it counts slots, not ranks",
    "PMIX_RANK": "no variable tells a size beside it: PMIx tells that to MPI alone",
    "ROLE_RANK": "it is the rank among those of torchrun's role; RANK is the job's",
    "ROLE_WORLD_SIZE": "it is the size of torchrun's role; WORLD_SIZE is the job's",
    "SLURM_NTASKS": "it counts the tasks of the allocation, not of this step",
    "SLURM_NPROCS": "it counts the tasks of the allocation, not of this step",
    "SLURM_TASKS_PER_NODE": "it is of the allocation, not of this step",
    "SLURM_NNODES": "it counts the nodes of the allocation, not of this step",
    "SLURM_JOB_NUM_NODES": "it counts the nodes of the allocation, not of this step",
    "SLURM_JOB_NODELIST": "the list need not follow the order of the ranks",
    "SLURM_STEP_NODELIST": "the list need not follow the order of the ranks",
    "SLURM_NODELIST": "the list need not follow the order of the ranks",
    "SLURM_LAUNCH_NODE_IPADDR": "it is where srun was typed, which need not be rank 0's node",
    "NODE_RANK": "it is an option of launchers, not their word",
}
UNREAL_STEP = "this process is no task of a Slurm step: a batch script and a shell have this variable, too"
LEFT_OVER = "of a step from which this batch script was submitted; Slurm lists one task on its node"
NOT_ALONE = "it says nothing without {0}"


def find_unused(environ: Mapping[str, str], found: Topology) -> Iterator[UnusedVariable]:
    """Every variable about places that is set and did not count for the topology."""
    used = {name.partition("[")[0] for _, name in found.origins}
    winner = next((family for family in FAMILIES if used & set(family.names) - set(MASTER)), None)
    families = {name: family for family in reversed(FAMILIES) for name in family.names}
    for name in dict.fromkeys([*(name for family in FAMILIES for name in family.names), *NEVER]):
        if name not in used and (value := get_value(environ, name)) is not None and not _is_read(name, found):
            yield UnusedVariable(name, value, _why(name, families.get(name), winner, environ))


def find_all_set(environ: Mapping[str, str]) -> list[str]:
    """The variables about places that are set, whatever they mean."""
    return find_set(environ, dict.fromkeys([*(name for family in FAMILIES for name in family.names), *NEVER]))


def _is_read(name: str, found: Topology) -> bool:
    """Whether it counted, though no field is its value: it told that this is a step."""
    return found.launcher == "srun" and name in slurm.STEP_IDS


def _why(name: str, family: LauncherFamily | None, winner: LauncherFamily | None, environ: Mapping[str, str]) -> str:
    if name in NEVER:
        return NEVER[name]
    if name in MASTER:
        other = MASTER[1 - MASTER.index(name)]
        return NOT_ALONE.format(other) if get_value(environ, other) is None else "there is no other rank to be met"
    if name.startswith("SLURM") and _is_unreal(environ):
        return UNREAL_STEP
    if winner is not None and family is not None and family is not winner:
        return winner.first or f"{winner.launcher} started this process"
    if winner is not None:
        return f"the other variables of {winner.launcher} tell the place"
    if name.startswith("SLURM"):
        return LEFT_OVER
    needed = " and ".join(_needed(family))
    return NOT_ALONE.format(needed) if needed else "it names no rank and no size"


def _needed(family: LauncherFamily | None) -> list[str]:
    return list(family.names[:2]) if family is not None and len(family.names) > 2 else []


def _is_unreal(environ: Mapping[str, str]) -> bool:
    return not find_set(environ, slurm.STEP_IDS) or slurm.is_shell(environ)

"""What the launchers of all MPIs have in common; one file each names their variables."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import slurm
from dualdist.environments.env_values import LauncherVariables, find_set, read_values, require_all
from dualdist.environments.infer_topology import get_main_address, infer_topology
from dualdist.topology import Topology


def rank_of_mpi(environ: Mapping[str, str], names: LauncherVariables, launcher: str) -> Topology:
    """The rank's place in MPI_COMM_WORLD; they meet by MPI broadcast unless MASTER_ADDR and MASTER_PORT are set."""
    told = read_values(environ, names)
    return infer_topology(
        told,
        launcher=launcher,
        source=f"{', '.join(find_set(environ, names.given()))} ({names.launcher})",
        master=get_main_address(environ),
        names=names,
        rendezvous="mpi",
        mpi=True,
    )


def rank_of_mpirun(environ: Mapping[str, str], names: LauncherVariables) -> Topology | None:
    """The rank's place under an mpirun that names all but the node; None where srun has started this process since.

    A local rank and a local size alone say nothing: people export them for other tools.
    """
    if not find_set(environ, (names.rank, names.size)) or slurm.started_with_pmix(environ):
        return None
    require_all(environ, names)
    found = rank_of_mpi(environ, names, "mpirun")
    slurm.refuse_leftover(environ, found, names)
    return found

"""Launchers that start MPI: Open MPI, Hydra (MPICH, Intel MPI), MVAPICH2, plain PMI, jsrun, PALS and Flux."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dualdist.environments import slurm
from dualdist.environments.env_values import (
    OVERRIDE,
    LauncherVariables,
    find_present,
    format_present,
    get_value,
    read_topology,
    require_agreement,
)
from dualdist.errors import TopologyError
from dualdist.topology import Topology

# OMPI_COMM_WORLD_NODE_RANK is not the node's index.
OPENMPI = LauncherVariables(
    "Open MPI",
    "mpirun -np N python script.py",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
HYDRA = LauncherVariables(
    "MPICH or Intel MPI",
    "mpirun -np N python script.py",
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
MVAPICH = LauncherVariables(
    "MVAPICH2",
    "mpirun_rsh -np N -hostfile hosts python script.py",
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
PMI = LauncherVariables("PMI", "mpiexec -n N python script.py", "PMI_RANK", "PMI_SIZE")
PMIX = ("PMIX_RANK", "PMIX_NAMESPACE")
# IBM's Job Step Manager, on LSF clusters.
JSM = LauncherVariables(
    "jsrun",
    "jsrun -n N python script.py",
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
)
# HPE's mpiexec on Cray systems under PBS. It gives no size itself; PMI does, which `mpiexec --pmi=pmix` leaves out.
PALS = LauncherVariables(
    launcher="PALS",
    command="mpiexec -n N python script.py",
    rank="PALS_RANKID",
    size="PMI_SIZE",
    node_rank="PALS_NODEID",
)
PALS_LOCAL_RANKS = ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
PALS_LOCAL_SIZES = ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
PALS_ONLY = (PALS.rank, PALS_LOCAL_RANKS[0], "PALS_NODEID")
FLUX = LauncherVariables(
    launcher="Flux",
    command="flux run -n N python script.py",
    rank="FLUX_TASK_RANK",
    size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
    num_nodes="FLUX_JOB_NNODES",
)
# Note [horovodrun --mpi]: Horovod 0.28.1 (runner/mpi_run.py) passes three options to every Open MPI, which its ranks
# see as these variables. Users copy the first two from Horovod's manual, but hardly --tag-output with them.
HOROVODRUN = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib", "OMPI_MCA_orte_tag_output": "1"}


def detect_openmpi(environ: Mapping[str, str]) -> Topology | None:
    """Read Open MPI's variables; the launcher is horovodrun if that called mpirun: Note [horovodrun --mpi]."""
    topology = read_mpirun(environ, OPENMPI)
    if topology is not None and all(get_value(environ, name) == value for name, value in HOROVODRUN.items()):
        return replace(topology, launcher="horovodrun")
    return topology


def detect_hydra(environ: Mapping[str, str]) -> Topology | None:
    """Read Hydra's variables. PMI_RANK without a local rank is from srun --mpi=pmi2, Flux or PALS."""
    return read_mpirun(environ, HYDRA) if find_present(environ, HYDRA.given()[2:]) else None


def detect_pmi(environ: Mapping[str, str]) -> Topology | None:
    """Read PMI_RANK and PMI_SIZE alone, as mpiexec.gforker sets them; refuse PMIx, which gives no size."""
    if find_present(environ, PMI.given()):
        return _read_mpi(environ, PMI, "mpirun")
    if all(get_value(environ, name) for name in PMIX) and not slurm.started_with_pmix(environ):
        raise TopologyError(
            f"{format_present(environ, PMIX)}, but no variable gives the number of ranks, which PMIx passes to MPI "
            f"alone: start with `mpirun -np N python script.py`, or set {OVERRIDE}"
        )
    return None


def detect_jsm(environ: Mapping[str, str]) -> Topology | None:
    """Read jsrun's variables; Open MPI's, which Spectrum MPI sets too, must agree."""
    if not find_present(environ, (JSM.rank, JSM.size)):
        return None
    topology = _read_mpi(environ, JSM, "jsrun")
    require_agreement(environ, topology, OPENMPI)
    return topology


def detect_pals(environ: Mapping[str, str]) -> Topology | None:
    """Read PALS's variables, which do not give the number of nodes."""
    present = find_present(environ, PALS_ONLY)
    if not present or slurm.is_step(environ) or _is_flux_task(environ):
        return None  # Slurm's cray_shasta plugin and Flux's cray-pals plugin set these variables too
    variables = replace(
        PALS,
        local_rank=next(iter(find_present(environ, PALS_LOCAL_RANKS)), None),
        local_size=next(iter(find_present(environ, PALS_LOCAL_SIZES)), None),
    )
    return _read_mpi(environ, variables, "mpiexec", list(dict.fromkeys([*present, PALS.rank, PALS.size])))


def detect_flux(environ: Mapping[str, str]) -> Topology | None:
    """Read Flux's variables, which give neither the local size nor the node rank."""
    return _read_mpi(environ, FLUX, "flux") if _is_flux_task(environ) else None


def _is_flux_task(environ: Mapping[str, str]) -> bool:
    """Return True in a task; Flux unsets these variables in its batch scripts and shells."""
    return bool(find_present(environ, (FLUX.rank, FLUX.size)))


def _read_mpi(
    environ: Mapping[str, str], variables: LauncherVariables, launcher: str, needed: Sequence[str] | None = None
) -> Topology:
    """Return the Topology in MPI_COMM_WORLD; rendezvous is by MPI broadcast unless MASTER_ADDR and _PORT are set."""
    return read_topology(environ, variables, launcher=launcher, needed=needed, rendezvous="mpi", mpi=True)


def read_mpirun(environ: Mapping[str, str], variables: LauncherVariables) -> Topology | None:
    """Return the Topology from mpirun's variables, None if srun --mpi=pmix started this process within an mpirun.

    A local rank and a local size alone are ignored: users export them for other tools.
    """
    if not find_present(environ, (variables.rank, variables.size)) or slurm.started_with_pmix(environ):
        return None
    topology = _read_mpi(environ, variables, "mpirun")
    slurm.refuse_leftover(environ, topology, variables)
    return topology

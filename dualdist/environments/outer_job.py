"""Variables that make this process a rank, and that every process and launcher which it starts inherits."""

from collections.abc import Mapping

from dualdist.environments import EXEC_VARIABLES, ORDER, horovodrun, mpi, set_by_exec, torchrun
from dualdist.environments.env_values import MASTER, find_present
from dualdist.utils.variables import PLACE, RANK_PROCESS, SPAWN_RENDEZVOUS

# What launchers set beside the variables of ORDER, by the variable that shows that one did.
BESIDE = {
    torchrun.RUN_ID: ("TORCHELASTIC_",),
    # With these mpirun takes itself for a part of the outer job, and refuses.
    mpi.OPENMPI.rank: ("OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "PMIX_"),
    mpi.HYDRA.rank: ("PMI_", "HYDI_"),
    horovodrun.VARIABLES.rank: ("HOROVOD_GLOO_", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_ELASTIC"),
}
OURS = (EXEC_VARIABLES, PLACE, RANK_PROCESS, SPAWN_RENDEZVOUS, torchrun.OVERRIDE_LAUNCHER)
OUR_PREFIX = "DUALDIST_RUN"
SLURM = "SLURM_"


def rank_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables without which this process is a job of one rank."""
    names = [name for each in ORDER for name in each.variables if name not in MASTER]
    names += [torchrun.RUN_ID, *(MASTER if torchrun.VARIABLES.rank in environ else ())]
    return find_present(environ, dict.fromkeys(names))


def outer_job_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of the job of which this process is a rank, for a launcher that it starts to remove.

    Slurm's stay: srun and mpirun read the allocation from them, and other launchers' variables go before them.
    """
    prefixes = (OUR_PREFIX, *(each for shown, found in BESIDE.items() if shown in environ for each in found))
    names = {*rank_variables(environ), *set_by_exec(environ), *OURS}
    return [name for name in environ if (name in names and not name.startswith(SLURM)) or name.startswith(prefixes)]

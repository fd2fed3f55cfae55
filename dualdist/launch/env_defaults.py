"""Defaults of `dualdist run`: the launcher, and the environment variables of ranks and launchers."""

from collections.abc import Container, Mapping

from dualdist.backends import registry
from dualdist.environments import slurm
from dualdist.environments.env_values import get_integer
from dualdist.launch.job import BACKEND_VARIABLE, TRANSPORT_VARIABLE, VARIABLE_NAME
from dualdist.launch.launchers import DEFAULT_LAUNCHER
from dualdist.launch.launchers.horovodrun import HOROVODRUN
from dualdist.launch.launchers.mpirun import MPIRUN
from dualdist.launch.launchers.spawn import SPAWN
from dualdist.launch.launchers.srun import SRUN
from dualdist.launch.processes import JOB_MARK
from dualdist.utils.control_channel import CONTROL_VARIABLE
from dualdist.utils.redaction import is_secret
from dualdist.utils.variables import THREADS

SLURM_JOB = "SLURM_JOB_ID"
SLURM_NODES = "SLURM_JOB_NUM_NODES"
# Not set without --ntasks; Slurm then starts one task per node.
SLURM_TASKS = "SLURM_NTASKS"
SLURM_CPUS = "SLURM_CPUS_PER_TASK"
# The network interface of each library; MPI and horovodrun have options for it.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
# Variables forwarded to ranks on other hosts. The others belong to this host, or must not leave it.
FORWARDED = ("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONUNBUFFERED")
FORWARDED_PREFIXES = (
    *("DUALDIST_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_"),
    *("NCCL_", "GLOO_", "HOROVOD_", "UCX_", "FI_"),
)
# Variables that a launcher needs itself, if it exports all of its environment.
LAUNCHER_NAMES = (
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "TZ", "TMPDIR"),
    *("PATH", "SSH_AUTH_SOCK", "SSH_AGENT_PID"),
)
LAUNCHER_PREFIXES = ("LC_", "XDG_", "PYTHON", "CUDA_", "OMPI_", "OPAL_", "PMIX_", "PRTE_")


def default_launcher(
    environ: Mapping[str, str],
    backend: str | None,
    transport: str | None = None,
    *,
    has_hosts: bool = False,
    is_elastic: bool = False,
) -> tuple[str, str]:
    """Return the launcher for a job that names none, and the reason for it."""
    backend = backend or environ.get(BACKEND_VARIABLE) or None
    if is_elastic and registry.uses_library(backend, registry.HOROVOD_LIBRARY):
        return HOROVODRUN.name, f"no --launcher was given and only this one keeps ranks of {backend} when one is lost"
    if is_elastic:
        return SPAWN.name, "no --launcher was given and this one keeps the other ranks when one is lost"
    transport = transport or environ.get(TRANSPORT_VARIABLE)
    if registry.needs_mpi(backend, transport):
        setting, value = ("backend", backend) if registry.needs_mpi(backend, None) else ("transport", transport)
        return MPIRUN.name, f"no --launcher was given and the {setting} {value} needs one that starts MPI"
    is_step = slurm.is_step(environ)
    if environ.get(SLURM_JOB) and not is_step:
        return SRUN.name, f"no --launcher was given and this is a Slurm allocation ({SLURM_JOB}={environ[SLURM_JOB]})"
    if has_hosts:
        spec = registry.find(backend)
        owner = "torch's own" if spec is None else f"the backend {backend}'s own"
        launcher = DEFAULT_LAUNCHER if spec is None else spec.launcher
        return launcher, f"no --launcher was given, hosts were, and it is {owner}"
    if is_step:
        return (
            DEFAULT_LAUNCHER,
            "no --launcher was given and srun started this process: a nested srun would wait for it",
        )
    return DEFAULT_LAUNCHER, f"no --launcher was given and this is no Slurm allocation ({SLURM_JOB} is not set)"


def allocated_tasks(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the number of tasks of this Slurm allocation, and its variable; None outside of an allocation."""
    if not environ.get(SLURM_JOB) or slurm.is_step(environ):
        return None
    return next(((tasks, name) for name in (SLURM_TASKS, SLURM_NODES) if (tasks := get_integer(environ, name))), None)


def cpus_per_task(environ: Mapping[str, str], ranks: int) -> int | None:
    """Return the cores of each rank under srun: those of a task, divided if there are more ranks than tasks.

    None if the allocation does not say how many cores a task has.
    """
    cpus, tasks = get_integer(environ, SLURM_CPUS), allocated_tasks(environ)
    if not cpus:
        return None
    return cpus if tasks is None else max(1, cpus * tasks[0] // max(ranks, tasks[0]))


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return the threads of each rank, so that the ranks of a host share its cores."""
    return max(1, cores // ranks)


def rank_variables(
    environ: Mapping[str, str], given: Mapping[str, str], *, threads: int | None, interface: str | None, has_hosts: bool
) -> dict[str, str]:
    """Return the variables of every rank: the job's go before the caller's, which go before our defaults."""
    forwarded = _select(environ, FORWARDED, FORWARDED_PREFIXES) if has_hosts else {}
    own = {name: value for name, value in forwarded.items() if name not in (CONTROL_VARIABLE, JOB_MARK)}
    defaults = {} if threads is None or THREADS in environ else {THREADS: str(threads)}
    return {**own, **defaults, **interface_variables(interface), **given}


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a launcher needs on this host, for one that exports all of its environment."""
    return _select(environ, LAUNCHER_NAMES, LAUNCHER_PREFIXES)


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables that make the libraries of all backends use this network interface."""
    return {} if interface is None else dict.fromkeys(INTERFACE_VARIABLES, interface)


def _select(environ: Mapping[str, str], names: Container[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the variables with these names or beginnings, without secrets and names that a shell cannot set."""
    found = {name: value for name, value in environ.items() if name in names or name.startswith(prefixes)}
    return {name: value for name, value in found.items() if VARIABLE_NAME.fullmatch(name) and not is_secret(name)}

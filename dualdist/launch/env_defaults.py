"""What `dualdist run` decides before it starts anything: the launcher, and the variables that people forget."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments import slurm
from dualdist.environments.env_values import get_integer
from dualdist.launch.control_channel import CONTROL_VARIABLE
from dualdist.launch.job import BACKEND_VARIABLE, TRANSPORT_VARIABLE, VARIABLE_NAME
from dualdist.launch.processes import JOB_MARK
from dualdist.utils.redaction import is_secret

SLURM_JOB = "SLURM_JOB_ID"
SLURM_NODES = "SLURM_JOB_NUM_NODES"
# Without --ntasks there is no such variable, and Slurm starts one task a node.
SLURM_TASKS = "SLURM_NTASKS"
SLURM_CPUS = "SLURM_CPUS_PER_TASK"
UNBUFFERED = "PYTHONUNBUFFERED"
THREADS = "OMP_NUM_THREADS"
# The launcher that each backend brings along, for hosts that are reached by ssh.
BACKEND_LAUNCHERS = {"native": "torchrun", "horovod": "horovodrun", "mpi": "mpirun"}
# Which interface libraries take; MPI and horovodrun have options for it.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
# What ranks on another host get of the variables here. The others belong to a host, or are nobody else's business.
FORWARDED = ("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", UNBUFFERED)
FORWARDED_PREFIXES = (
    *("DUALDIST_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_"),
    *("NCCL_", "GLOO_", "HOROVOD_", "UCX_", "FI_"),
)
NOT_FORWARDED = (CONTROL_VARIABLE, JOB_MARK)
# What a launcher itself needs of the variables here, where it hands on all that it has.
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
    keeps_ranks: bool = False,
) -> tuple[str, str]:
    """The launcher where none was named, and why this one."""
    if keeps_ranks:
        return "horovodrun", "no --launcher was named and only this one goes on with fewer ranks"
    backend, transport = backend or environ.get(BACKEND_VARIABLE) or None, transport or environ.get(TRANSPORT_VARIABLE)
    for setting, value in (("backend", backend), ("transport", transport)):
        if value == "mpi":
            return "mpirun", f"no --launcher was named and the {setting} mpi needs one that starts MPI"
    is_step = slurm.is_step(environ)
    if environ.get(SLURM_JOB) and not is_step:
        return "srun", f"no --launcher was named and this is a Slurm allocation ({SLURM_JOB}={environ[SLURM_JOB]})"
    if has_hosts:
        own = BACKEND_LAUNCHERS.get(backend or "", "torchrun")
        whose = f"the backend {backend}'s own" if backend in BACKEND_LAUNCHERS else "torch's own"
        return own, f"no --launcher was named, hosts are, and it is {whose}"
    if is_step:
        return "torchrun", "no --launcher was named and srun has started this process: another srun would wait for it"
    return "torchrun", f"no --launcher was named and this is no Slurm allocation ({SLURM_JOB} is not set)"


def allocated_tasks(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """How many tasks were asked of Slurm for this allocation, and which variable says so; None outside of one."""
    if not environ.get(SLURM_JOB) or slurm.is_step(environ):
        return None
    return next(((tasks, name) for name in (SLURM_TASKS, SLURM_NODES) if (tasks := get_integer(environ, name))), None)


def cpus_per_task(environ: Mapping[str, str], ranks: int) -> int | None:
    """The cores of each rank that srun starts: those of a task, or its share where there are more ranks than tasks.

    None where Slurm was not told how many a task has.
    """
    cpus, tasks = get_integer(environ, SLURM_CPUS), allocated_tasks(environ)
    if not cpus:
        return None
    return cpus if tasks is None else max(1, cpus * tasks[0] // max(ranks, tasks[0]))


def is_spread(environ: Mapping[str, str], launcher: str, *, has_hosts: bool) -> bool:
    """Whether ranks are on several hosts, as far as is known before they start."""
    return has_hosts or (launcher in ("srun", "mpirun") and environ.get(SLURM_NODES, "1") != "1")


def threads_per_rank(cores: int, ranks: int) -> int:
    """Of each rank, so that those of a host share its cores."""
    return max(1, cores // ranks)


def rank_variables(
    environ: Mapping[str, str],
    given: Mapping[str, str],
    *,
    threads_a_rank: int | None,
    interface: str | None,
    has_hosts: bool,
) -> dict[str, str]:
    """The variables of every rank: the user's word goes before ours, and the one given with the job before all."""
    kept = {name: value for name, value in environ.items() if has_hosts and _is_forwarded(name)}
    ours = {UNBUFFERED: "1"}
    if threads_a_rank is not None:
        ours[THREADS] = str(threads_a_rank)
    ours = {name: value for name, value in ours.items() if name not in environ}
    return {**kept, **ours, **interface_variables(interface), **given}


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without which a launcher cannot work on this host, for one that would hand on all of them."""
    return {
        name: value
        for name, value in environ.items()
        if (name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES))
        and VARIABLE_NAME.fullmatch(name)
        and not is_secret(name)
    }


def secret_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the variables that hold secrets."""
    return tuple(sorted(filter(is_secret, environ)))


def interface_variables(interface: str | None) -> dict[str, str]:
    """By which the libraries of all backends take this network interface."""
    return {} if interface is None else dict.fromkeys(INTERFACE_VARIABLES, interface)


def _is_forwarded(name: str) -> bool:
    is_a_jobs = name in FORWARDED or name.startswith(FORWARDED_PREFIXES)
    return is_a_jobs and name not in NOT_FORWARDED and not is_secret(name) and VARIABLE_NAME.fullmatch(name) is not None

"""The launch: the requested backend and transport, and how Slurm starts the job."""

from collections.abc import Iterator

from dualdist.backends import registry
from dualdist.backends.horovod import CONTROLLER
from dualdist.doctor.checks import DoctorContext, Finding, error, warning
from dualdist.doctor.explain import explain_backend, invalid_choices
from dualdist.environments import slurm
from dualdist.environments.env_values import INTEGER, get_value
from dualdist.launch.env_defaults import SLURM_JOB, SLURM_NODES, SLURM_TASKS
from dualdist.launch.launchers import find_conflicts
from dualdist.rendezvous.backend_selection import BACKEND, TRANSPORT
from dualdist.topology import Topology
from dualdist.utils.package_probe import TorchProbe
from dualdist.utils.variables import unknown_variables

REFUSED = "dd.init() refuses it on every rank"
TASK_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")


def find(context: DoctorContext) -> Iterator[Finding]:
    yield from _check_choices(context)
    for problem in unknown_variables(context.environ):
        yield warning("variable-unknown", problem, "it changes nothing", "correct its name, or unset it")
    topology = context.topology
    if topology is not None and get_value(context.environ, SLURM_JOB) is not None:
        if topology.launcher == "none":
            yield from _check_outside_step(context)
        elif topology.launcher == "srun" and topology.size == 1:
            yield from _check_single_task(context, "srun started one task with")
    yield from _check_pmix(context)


def _check_choices(context: DoctorContext) -> Iterator[Finding]:
    invalid = invalid_choices(context.environ)
    for problem in invalid:
        yield error("choice-unknown", problem, REFUSED, "use one of these values, or unset the variable")
    if not invalid and context.topology is not None:
        yield from _check_backend(context, context.topology)


def _check_backend(context: DoctorContext, topology: Topology) -> Iterator[Finding]:
    """Check the backend that this process would get, with the requested transport, against launcher and GPUs."""
    gpus = context.visible_gpus
    backend, why = explain_backend(context.environ, topology, context.backends, has_gpu=gpus > 0)
    if backend == "single":
        return
    variable = TRANSPORT if get_value(context.environ, TRANSPORT) or backend != "horovod" else CONTROLLER
    transport = (get_value(context.environ, variable) or "").lower()
    problems = [message for _, message in find_conflicts(None, backend, transport or None)]
    if registry.needs_mpi(backend, transport) and topology.size > 1 and not topology.mpi:
        problems.append(f"{topology.launcher} did not start MPI, as mpirun, mpiexec or srun --mpi=pmix would")
    if context.requested_backend == "mpi" and not context.backends["mpi"].available:
        problems.append(context.backends["mpi"].reason)
    if transport == "nccl" and isinstance(context.facts.torch, TorchProbe) and not gpus:
        problems.append("nccl moves GPU tensors, and torch sees no GPU here")
    requested = f"{variable}={transport}, and " if transport else ""
    for problem in problems:
        yield error(
            "backend-impossible",
            f"{requested}this process would use the backend {backend} ({why}): {problem}",
            REFUSED,
            f"unset {variable if transport else BACKEND}, or choose a backend and a launcher that support it",
        )


def _check_outside_step(context: DoctorContext) -> Iterator[Finding]:
    """Check a process that is not a task of a Slurm step: fine for a tool, wrong for a training.

    Slurm sets SLURM_PROCID in a batch script, though it is no task; in a shell of salloc it does not.
    """
    variable = SLURM_TASKS if get_value(context.environ, SLURM_TASKS) is not None else SLURM_NODES
    value = get_value(context.environ, variable) or ""
    tasks = int(value) if INTEGER.fullmatch(value) else 1
    is_script = get_value(context.environ, slurm.VARIABLES.rank) is not None and not slurm.is_shell(context.environ)
    if tasks > 1:
        yield Finding(
            "warning" if is_script else "info",
            "slurm-one-process",
            f"{variable}={tasks}, but this process is not a task of a Slurm step",
            f"without srun, a training in this {'batch script' if is_script else 'shell of salloc'} is a 1-rank job",
            f"start {tasks} ranks: {slurm.VARIABLES.command.replace('-n N', f'-n {tasks}')}, or dualdist run",
        )
    elif is_script:
        yield from _check_single_task(context, "this batch script is a single task with")


def _check_single_task(context: DoctorContext, seen: str) -> Iterator[Finding]:
    """Check a single task for several GPUs, of which it will use one."""
    listed = next((get_value(context.environ, name) for name in TASK_GPUS if get_value(context.environ, name)), None)
    gpus = len(listed.split(",")) if listed else 0
    if gpus > 1:
        yield warning(
            "slurm-one-task",
            f"{seen} {gpus} GPUs ({listed})",
            "a rank uses one GPU; the others stay idle",
            f"srun --ntasks-per-node={gpus} python script.py, or "
            f"srun --ntasks-per-node=1 torchrun --nproc-per-node={gpus} script.py, or on one node "
            f"dualdist run -np {gpus} --launcher torchrun script.py",
        )


def _check_pmix(context: DoctorContext) -> Iterator[Finding]:
    types = context.facts.srun_mpi_types
    if types is None or any(name.startswith(("pmix", "cray")) for name in types):
        return
    requested = (context.requested_backend, get_value(context.environ, TRANSPORT))
    is_needed = "mpi" in requested and context.launcher in ("none", "srun")
    yield Finding(
        "error" if is_needed else "info",
        "srun-without-pmix",
        f"srun supports {', '.join(types) or 'no MPI type'}, but not pmix",
        f"{BACKEND}=mpi needs MPI" if is_needed else "ranks that srun starts cannot use MPI; native and Gloo work",
        "start with mpirun inside the allocation, or install Slurm's PMIx plugin (package slurm-pmix or libpmix)",
    )

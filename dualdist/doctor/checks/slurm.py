"""Slurm: srun without PMIx, and scripts that start one task."""

from __future__ import annotations

from collections.abc import Iterator

from dualdist.doctor.context import DoctorContext
from dualdist.doctor.findings import Finding
from dualdist.environments import slurm
from dualdist.environments.env_values import INTEGER, get_value
from dualdist.launch.env_defaults import SLURM_JOB, SLURM_NODES, SLURM_TASKS
from dualdist.rendezvous.backend_selection import BACKEND

GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")


def find(case: DoctorContext) -> Iterator[Finding]:
    """What is wrong with how Slurm starts this job, or would."""
    topology = case.topology
    if topology is not None and get_value(case.environ, SLURM_JOB) is not None:
        if topology.launcher == "none":
            yield from _of_one_process(case)
        elif topology.launcher == "srun" and topology.size == 1:
            yield from _of_one_task(case, "srun started one task, and gave it")
    yield from _of_pmix(case)


def _of_one_process(case: DoctorContext) -> Iterator[Finding]:
    """A job of one in an allocation of several tasks: right for what a script does itself, wrong for a forgotten srun.

    Slurm gives a batch script a rank, though it is no task; a shell of salloc has none.
    """
    told = SLURM_TASKS if get_value(case.environ, SLURM_TASKS) is not None else SLURM_NODES
    value = get_value(case.environ, told) or ""
    tasks = int(value) if INTEGER.fullmatch(value) else 1
    is_script = get_value(case.environ, slurm.VARIABLES.rank) is not None and not slurm.is_shell(case.environ)
    if tasks > 1:
        yield Finding(
            "slurm-one-process",
            "warning" if is_script else "info",
            f"{told}={tasks}, but this process is no task of a Slurm step",
            "a batch script runs once: started like this, a training is a job of one rank"
            if is_script
            else "a shell of salloc is one process: started from it, a training is a job of one rank",
            f"to start {tasks} ranks, put srun before it: {slurm.VARIABLES.command.replace('-n N', f'-n {tasks}')}; "
            "dualdist run does so by itself",
        )
    elif is_script:
        yield from _of_one_task(case, "this batch script is one task, and has")


def _of_one_task(case: DoctorContext, seen: str) -> Iterator[Finding]:
    """One task, which has several GPUs: it will use one of them."""
    listed = next((get_value(case.environ, name) for name in GPUS if get_value(case.environ, name)), None)
    gpus = len(listed.split(",")) if listed else 0
    if gpus > 1:
        yield Finding(
            "slurm-one-task",
            "warning",
            f"{seen} {gpus} GPUs ({listed})",
            "a rank uses one GPU: the others stay idle",
            f"srun --ntasks-per-node={gpus} python script.py, or "
            f"srun --ntasks-per-node=1 torchrun --nproc-per-node={gpus} script.py, or on one node "
            f"dualdist run -np {gpus} --launcher torchrun script.py",
        )


def _of_pmix(case: DoctorContext) -> Iterator[Finding]:
    kinds = case.facts.srun_mpi
    if kinds is None or any(kind.startswith(("pmix", "cray")) for kind in kinds):
        return
    needs_it = case.wants_mpi and case.launcher in ("none", "srun")
    yield Finding(
        "srun-without-pmix",
        "error" if needs_it else "info",
        f"this Slurm's srun knows {', '.join(kinds) or 'no MPI'}, and no pmix",
        f"{BACKEND}=mpi asks for MPI" if needs_it else "ranks that srun starts cannot use MPI; native and Gloo work",
        "start with mpirun inside the allocation, or ask for Slurm's PMIx plug-in (package slurm-pmix or libpmix)",
    )

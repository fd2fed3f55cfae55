"""srun, Slurm's launcher: each rank is a task of a step."""

from collections.abc import Sequence

from dualdist.backends import registry
from dualdist.launch.job import Command, Job, LauncherProgram, Site
from dualdist.launch.launchers.base import Launcher

PROGRAM = LauncherProgram("srun", "it comes with Slurm: log in to a node of the cluster")


def srun_commands(job: Job, site: Site) -> tuple[Command, ...]:
    flags = ["--kill-on-bad-exit=1"]  # else Slurm waits for the other ranks when one has failed
    if job.hosts:  # arbitrary: the list names the node of every rank, in rank order
        nodes = ",".join(host.name for host, ranks in job.ranks_by_host() for _ in range(ranks))
        flags += ["--distribution=arbitrary", f"--nodelist={nodes}"]
    elif job.nodes is not None:
        flags.append(f"--nodes={job.nodes}")
    flags.append(f"--ntasks={job.ranks}")
    if site.task_cpus is not None:  # since 22.05 srun no longer takes it from the allocation
        flags.append(f"--cpus-per-task={site.task_cpus}")
    if registry.needs_mpi(job.backend, job.transport):
        flags.append("--mpi=pmix")
    # Tasks inherit all variables of srun: it gets no secrets but those that the job names.
    unset = tuple(name for name in site.secret_names if name not in job.env)
    return (Command((site.path_of(PROGRAM), *flags, site.python, *job.program), job.variables(), unset=unset),)


# Options of the allocation's tasks, which srun would take for a step, too: a step shares all GPUs of its node.
TASK_VARIABLES = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")


def step_argv(host: str, site: Site, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the argv that runs a command on one node of this allocation, in a step that shares all of the node."""
    flags = ("--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", f"--cpus-per-task={site.node_cores[host]}")
    return (site.path_of(PROGRAM), *flags, "--cpu-bind=none", "--mpi=none", "--export=ALL", "--input=none", *argv)


SRUN = Launcher("srun", srun_commands, (PROGRAM,), mpi="optional", uses_allocation=True, uses_task_cpus=True)

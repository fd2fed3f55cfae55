"""Launchers whose command lines are a few words: plain python, spawn, torchrun, srun; and jsrun, for scripts only."""

from dualdist.backends import registry
from dualdist.environments.torchrun import OVERRIDE_ADDRESS, OVERRIDE_LAUNCHER, OVERRIDE_VARIABLES
from dualdist.errors import LaunchError
from dualdist.launch.job import Command, Host, Job, Launcher, Site


def python_commands(job: Job, site: Site) -> tuple[Command, ...]:
    if job.ranks != 1 or job.hosts:
        raise LaunchError("plain python starts 1 rank on this host: choose a launcher, or call dd.spawn")
    return (Command((site.python, *job.program), job.variables()),)


def spawn_commands(job: Job, site: Site) -> tuple[Command, ...]:
    """Return one command per rank, with its rank and the rendezvous in DUALDIST_ variables."""
    hosts = job.ranks_by_host() or [(Host("", job.ranks, is_local=True), job.ranks)]
    rendezvous = site.require_rendezvous()
    commands: list[Command] = []
    for node_rank, (host, local_size) in enumerate(hosts):
        for local_rank in range(local_size):
            variables = {
                **job.variables(),
                **topology_variables(len(commands), job.ranks, local_rank, local_size, node_rank, len(hosts)),
                **dict(zip(OVERRIDE_ADDRESS, (rendezvous.address, str(rendezvous.port)), strict=True)),
            }
            commands.append(Command((site.python, *job.program), variables, None if host.is_local else host.name))
    return tuple(commands)


def topology_variables(
    rank: int, size: int, local_rank: int, local_size: int, node_rank: int = 0, num_nodes: int = 1
) -> dict[str, str]:
    """Return the variables that give a rank its topology, if dualdist itself starts it."""
    numbers = (rank, size, local_rank, local_size, node_rank, num_nodes)
    return {OVERRIDE_LAUNCHER: "spawn", **dict(zip(OVERRIDE_VARIABLES.given(), map(str, numbers), strict=True))}


def torchrun_commands(job: Job, site: Site) -> tuple[Command, ...]:
    torchrun, variables, program = site.path_of("torchrun"), job.variables(), job.program
    if any(word.startswith("--") for word in program):
        # Torchrun would refuse what could be an abbreviation of several of its own options, such as the program's --n.
        first = int(program[0] == "-m")
        program = (*program[:first], "--", *program[first:])
    if not job.hosts:
        # --standalone takes a free port, so that jobs do not collide; the loopback address needs no name service.
        argv = (torchrun, "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={job.ranks}", *program)
        return (Command(argv, variables),)
    # Static rendezvous, as its ranks follow the order of the hosts; c10d numbers them by address.
    hosts, rendezvous = job.ranks_by_host(), site.require_rendezvous()
    commands = []
    for node_rank, (host, local_size) in enumerate(hosts):
        flags = (
            f"--nnodes={len(hosts)}",
            f"--node-rank={node_rank}",
            f"--nproc-per-node={local_size}",
            f"--master-addr={rendezvous.address}",
            f"--master-port={rendezvous.port}",
        )
        commands.append(Command((torchrun, *flags, *program), variables, None if host.is_local else host.name))
    return tuple(commands)


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
    return (Command((site.path_of("srun"), *flags, site.python, *job.program), job.variables(), unset=unset),)


PYTHON = Launcher("python", python_commands, is_single_rank=True)
SPAWN = Launcher("spawn", spawn_commands)
TORCHRUN = Launcher("torchrun", torchrun_commands, repeats_failures=True)
SRUN = Launcher("srun", srun_commands, mpi="optional", uses_allocation=True, uses_task_cpus=True)
# IBM's Job Step Manager needs resource sets, which the script for LSF computes from its resources.
JSRUN = Launcher("jsrun", None, mpi="always", uses_allocation=True)

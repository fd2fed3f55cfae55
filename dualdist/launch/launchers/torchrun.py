"""torchrun, torch's launcher: one agent on each host."""

from collections.abc import Iterator

from dualdist.launch.job import Command, Job, LauncherProgram, Site
from dualdist.launch.launchers.base import Launcher
from dualdist.launch.script_request import ScriptRequest

PROGRAM = LauncherProgram("torchrun", "it comes with torch: pip install torch")


def torchrun_commands(job: Job, site: Site) -> tuple[Command, ...]:
    torchrun, variables, program = site.path_of(PROGRAM), job.variables(), job.program
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


def script_refusals(request: ScriptRequest) -> Iterator[str]:
    if request.gpus_per_task:
        yield (
            f"--gpus-per-task {request.gpus_per_task}: torchrun is one task on each node, and its ranks see all GPUs: "
            f"--gpus-per-node {request.node_gpus}"
        )


TORCHRUN = Launcher("torchrun", torchrun_commands, (PROGRAM,), repeats_failures=True, script_refusals=script_refusals)

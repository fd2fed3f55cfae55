"""spawn: dualdist starts each rank itself, on other hosts by ssh."""

from dualdist.environments.torchrun import OVERRIDE_ADDRESS, OVERRIDE_LAUNCHER, OVERRIDE_VARIABLES
from dualdist.environments.torchrun import SPAWN as NAME
from dualdist.launch.job import Command, Host, Job, Site
from dualdist.launch.launchers.base import Launcher
from dualdist.utils.variables import PLACE


def spawn_commands(job: Job, site: Site) -> tuple[Command, ...]:
    """Return one command per rank, with its rank and the rendezvous in DUALDIST_ variables.

    In an elastic job it is one per place, and the program asks `dualdist run` for its rank.
    """
    hosts = job.ranks_by_host() or [(Host("", job.ranks, is_local=True), job.ranks)]
    if job.min_ranks is not None:
        places = [host for host, count in hosts for _ in range(count)]
        return tuple(place_command(job, site, place, host) for place, host in enumerate(places))
    rendezvous = site.require_rendezvous()
    commands: list[Command] = []
    for node_rank, (host, local_size) in enumerate(hosts):
        for local_rank in range(local_size):
            number = len(commands)
            own = topology_variables(number, job.ranks, local_rank, local_size, node_rank, len(hosts))
            own |= zip(OVERRIDE_ADDRESS, (rendezvous.address, str(rendezvous.port)), strict=True)
            command = (site.python, *job.program)
            commands.append(Command(command, {**job.variables(), **own}, None if host.is_local else host.name))
    return tuple(commands)


def place_command(job: Job, site: Site, place: int, host: Host) -> Command:
    """Return the command that starts the program of one place of an elastic job."""
    own = place_variables(place, max(job.ranks, place + 1), is_one_node=not job.hosts)
    return Command((site.python, *job.program), {**job.variables(), **own}, None if host.is_local else host.name)


def place_variables(place: int, places: int, *, is_one_node: bool) -> dict[str, str]:
    """Return the variables of an elastic job's program: its place, and a rank that holds until it asks for its own.

    Its node and local rank are left to the ranks' meeting, unless all are on this host.
    """
    names = OVERRIDE_VARIABLES
    one_node = {names.num_nodes: "1"} if is_one_node and names.num_nodes else {}
    return {
        PLACE: str(place),
        OVERRIDE_LAUNCHER: SPAWN.name,
        names.rank: str(place),
        names.size: str(places),
    } | one_node


def topology_variables(
    rank: int, size: int, local_rank: int, local_size: int, node_rank: int = 0, num_nodes: int = 1
) -> dict[str, str]:
    """Return the variables that give a rank its topology, if dualdist itself starts it."""
    numbers = (rank, size, local_rank, local_size, node_rank, num_nodes)
    return {OVERRIDE_LAUNCHER: NAME, **dict(zip(OVERRIDE_VARIABLES.given(), map(str, numbers), strict=True))}


SPAWN = Launcher(NAME, spawn_commands, elastic="dualdist run")

"""Launchers: one description each, from which the command lines, options and errors that concern them are derived.

To add one, write its commands and its Launcher in a module of this package, and add it to ALL; what a user installs for
it, to INSTALL_HINTS of job.py;
dualdist/environments is where its ranks find who they are. If it starts MPI, add its name to MPI_LAUNCHERS of
rendezvous/backend_selection.py; if it shows each rank only some of the host's GPUs, to RESTRICTS_GPUS of
doctor/checks/host.py.
"""

from collections.abc import Collection, Iterator

from dualdist.backends import registry
from dualdist.launch.job import Command, Job, Launcher, Site
from dualdist.launch.launchers.horovodrun import HOROVODRUN, HOROVODRUN_MPI
from dualdist.launch.launchers.mpirun import MPIRUN
from dualdist.launch.launchers.simple import JSRUN, PYTHON, SPAWN, SRUN, TORCHRUN
from dualdist.utils.suggest import did_you_mean, require_choice

ALL = {each.name: each for each in (TORCHRUN, HOROVODRUN, HOROVODRUN_MPI, MPIRUN, SRUN, JSRUN, SPAWN, PYTHON)}
# Those that `dualdist run` starts.
LAUNCHERS = {name: each for name, each in ALL.items() if each.commands is not None}
MULTI_RANK_LAUNCHERS = tuple(name for name, each in LAUNCHERS.items() if not each.is_single_rank)
ELASTIC_LAUNCHER = next(name for name, each in LAUNCHERS.items() if each.is_elastic)
REBUILD = "build one with MPI by dualdist install-horovod --force"


def build_commands(launcher: str, job: Job, site: Site) -> tuple[Command, ...]:
    """Return the commands that together start the job; LaunchError if the site lacks what the launcher needs."""
    commands = LAUNCHERS[check_launcher(launcher)].commands
    assert commands is not None
    return commands(job, site)


def build_command(launcher: str, job: Job, site: Site) -> Command:
    """Return the only command of the job: every launcher but spawn needs one on a single host."""
    (command,) = build_commands(launcher, job, site)
    return command


def check_launcher(launcher: str) -> str:
    """Return the name if `dualdist run` starts such a launcher; else UsageError with the nearest name."""
    return require_choice(launcher, LAUNCHERS, "launcher")


def find_conflicts(
    launcher: str | None,
    backend: str | None,
    transport: str | None,
    *,
    ranks: int | None = None,
    has_hosts: bool = False,
    min_ranks: int | None = None,
    horovod_has_mpi: bool | None = None,
    launchers: Collection[str] = LAUNCHERS.keys(),
) -> Iterator[tuple[str, str]]:
    """Yield each option that conflicts with another, and the error message, for job files and command lines alike.

    Options that are None were not given.

    Args:
        horovod_has_mpi: the installed Horovod was built with MPI; None if unknown.
        launchers: the launchers to choose from.
    """
    chosen = ALL.get(launcher or "")
    if chosen is not None:
        yield from _mpi_conflicts(chosen, backend, transport, horovod_has_mpi, launchers)
        if chosen.commands is None and launcher not in launchers:
            yield "launcher", f"only job scripts use {launcher}: add --scheduler, or choose {' or '.join(launchers)}"
        if min_ranks is not None and not chosen.is_elastic:
            message = f"only {ELASTIC_LAUNCHER} goes on with fewer ranks, not {launcher}: choose it, or max_restarts"
            yield "min_ranks", message
        if chosen.is_single_rank and (has_hosts or ranks not in (None, 1)):
            yield "launcher", "plain python starts one rank on this host: choose torchrun, mpirun or spawn"
    spec = registry.find(backend)
    if spec is not None and transport is not None and transport not in spec.transports:
        valid = spec.transports
        choices = f"{'one of ' * (len(valid) > 1)}{', '.join(valid)}"
        message = f"expected {choices} for the backend {backend}, not {transport}"
        yield "transport", message + did_you_mean(transport, valid)
    uses_horovod = registry.uses_library(backend, registry.HOROVOD_LIBRARY)
    if horovod_has_mpi is False and uses_horovod and transport == "mpi":
        yield "transport", f"the installed Horovod was built without MPI: {REBUILD}"


def _mpi_conflicts(
    launcher: Launcher,
    backend: str | None,
    transport: str | None,
    horovod_has_mpi: bool | None,
    launchers: Collection[str],
) -> Iterator[tuple[str, str]]:
    for setting, value, needs_mpi in (
        ("backend", backend, registry.needs_mpi(backend, None)),
        ("transport", transport, registry.needs_mpi(None, transport)),
    ):
        if needs_mpi and launcher.mpi == "never":
            hint = f"choose {' or '.join(name for name in launchers if ALL[name].mpi != 'never')}"
            yield setting, f"the {setting} {value} needs a launcher that starts MPI, not {launcher.name}: {hint}"
    uses_horovod = registry.uses_library(backend, registry.HOROVOD_LIBRARY)
    if launcher.mpi == "always" and horovod_has_mpi is False and uses_horovod and transport is None:
        built = "the installed Horovod was built without it: choose torchrun or the transport gloo"
        yield "launcher", f"{launcher.name} starts MPI, but {built}, or {REBUILD}"

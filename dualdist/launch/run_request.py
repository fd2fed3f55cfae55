"""The request of `dualdist run`: the program and the options, which are keys of a job file too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.errors import UsageError
from dualdist.launch.hosts import is_local_host, parse_hosts
from dualdist.launch.job import VARIABLE_NAME, Host
from dualdist.launch.launchers import ALL, LAUNCHERS
from dualdist.launch.option import flag, one_of, option, seconds, text, texts, whole

HVD_MODULE = ("-m", "dualdist.hvd")
# Longer texts of options.
RANKS = "number of ranks (default: the slots of the hosts, or the tasks of a Slurm allocation, else 1)"
LAUNCHER = (
    f"what starts them: {', '.join(LAUNCHERS)} (default: mpirun for the backend mpi, srun in a Slurm allocation, "
    "the backend's own if hosts are given, else torchrun)"
)
BACKEND = "native, horovod, mpi or auto (default: DUALDIST_BACKEND, else auto, or native with --as-horovod)"
TRANSPORT = "the transport of the backend, such as shm, gloo, nccl or mpi (default: DUALDIST_TRANSPORT, else auto)"
TORCH_BACKEND = (
    "the backend of init_process_group(), such as dualdist, in place of gloo, mpi and, without a GPU, nccl "
    "(default: DUALDIST_TORCH_BACKEND)"
)
MAX_RESTARTS = "restart all ranks after a failure (default: 0 times)"
MIN_RANKS = "continue while N ranks are left, in the same processes; lost ones restart (see dd.elastic.run)"
MAX_RANKS = "with --min-ranks: at most N ranks at a time, instead of -np or all slots"
HOST_DISCOVERY = "with --min-ranks: a program that prints the current hosts, a:2 on each line; it is run every second"
ELASTIC_TIMEOUT = "with --min-ranks: wait S seconds with fewer ranks, then exit with code 75 (default: 600)"
TIMEOUT = "end the job after S seconds, with exit code 124"
TAG_OUTPUT = "begin each line with its rank, [3], or [3 host] on several hosts"
AS_HOROVOD = "the program was written for Horovod: let `import horovod.torch` import dualdist.hvd"


def read_hosts(given: Any) -> tuple[Host, ...]:
    words = given if isinstance(given, list) else [given]
    if not words or not all(isinstance(word, str) for word in words):
        raise ValueError("hosts and their slots, as a:2,b:2")
    return parse_hosts(",".join(words))


def read_variables(given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise ValueError("a mapping of variables to their values")
    for name, value in given.items():
        if not VARIABLE_NAME.fullmatch(name) or not isinstance(value, str):
            raise ValueError(f"variables' names, of letters, digits and underscores, with one value each; see {name!r}")
    return given


@dataclass(frozen=True)
class RunRequest:
    """The options of a job, of the command line or of a job file; `resources` are for a scheduler."""

    program: str | None = option(text, "the script", flags=())
    module: str | None = option(text, "the module, as for python -m", flags=())
    args: tuple[str, ...] = option(texts, "its arguments", flags=(), default=())
    ranks: int | None = option(whole(1), RANKS, "N", flags=("-np", "--ranks"))
    launcher: str | None = option(one_of(lambda: tuple(ALL)), LAUNCHER, "NAME")
    backend: str | None = option(one_of(registry.choices), BACKEND, "NAME")
    transport: str | None = option(one_of(registry.transports), TRANSPORT, "NAME")
    torch_backend: str | None = option(text, TORCH_BACKEND, "NAME")
    hosts: tuple[Host, ...] = option(
        read_hosts,
        "hosts to reach by ssh, and the number of ranks on each",
        "A:2,B:2",
        flags=("-H", "--hosts"),
        default=(),
    )
    hostfile: str | None = option(text, "a file of hosts, with `a slots=2` or `a:2` on each line", "FILE")
    network_interface: str | None = option(text, "the interface by which the hosts reach each other", "IF")
    env: Mapping[str, str] = option(read_variables, "variables of every rank", flags=(), default={})
    max_restarts: int = option(whole(0), MAX_RESTARTS, "N", default=0, is_run_only=True)
    min_ranks: int | None = option(whole(1), MIN_RANKS, "N", is_run_only=True)
    max_ranks: int | None = option(whole(1), MAX_RANKS, "N", is_run_only=True)
    host_discovery_script: str | None = option(text, HOST_DISCOVERY, "FILE", is_run_only=True)
    elastic_timeout: float | None = option(seconds, ELASTIC_TIMEOUT, "S", is_run_only=True)
    timeout: float | None = option(seconds, TIMEOUT, "S", is_run_only=True)
    log_dir: str | None = option(
        text, "write each rank's output to DIR/rank-N.log on its host", "DIR", is_run_only=True
    )
    tag_output: bool = option(flag, TAG_OUTPUT, default=False, is_run_only=True)
    as_horovod: bool = option(flag, AS_HOROVOD, default=False)
    resources: Mapping[str, Any] = field(default_factory=dict)

    @property
    def default_ranks(self) -> int:
        """The ranks: as given, else one per slot of the hosts, else 1."""
        if self.max_ranks is not None:
            return min(self.max_ranks, sum(host.slots for host in self.hosts) or self.max_ranks)
        return (sum(host.slots for host in self.hosts) or 1) if self.ranks is None else self.ranks

    @property
    def other_hosts(self) -> tuple[Host, ...]:
        """The hosts, unless all of them are this one."""
        return () if all(is_local_host(host.name) for host in self.hosts) else self.hosts

    def python_words(self, *, is_local: bool) -> tuple[str, ...]:
        """Return what follows `python` on a rank; UsageError if there is none, or no such script on this host."""
        words = [word for word in (self.module or self.program, *self.args) if word is not None]
        return program_words(words, is_module=self.module is not None, as_horovod=self.as_horovod, is_local=is_local)


def program_words(words: Sequence[str], *, is_module: bool, as_horovod: bool, is_local: bool = True) -> tuple[str, ...]:
    """Return what follows `python` on a rank; UsageError if there is no program, or no such script on this host."""
    if not words:
        raise UsageError("no program: expected dualdist run [option ...] script.py, or -m and a module")
    if not is_module and is_local and not Path(words[0]).exists():
        is_python = Path(words[0]).name.startswith("python")
        hint = "leave out the interpreter: dualdist run -np 2 train.py" if is_python else "type -m before a module"
        raise UsageError(f"there is no script {words[0]!r} in {Path.cwd()}; {hint}")
    return (*(HVD_MODULE if as_horovod else ()), *(("-m",) if is_module else ()), *words)

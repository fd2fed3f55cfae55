"""A request to a scheduler: the program, its ranks and resources, checked once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeVar

from dualdist.backends import registry
from dualdist.errors import UsageError
from dualdist.launch.job import (
    BACKEND_VARIABLE,
    TRANSPORT_VARIABLE,
    check_job_name,
    check_word,
    find_resource_conflicts,
    parse_duration,
    parse_mebibytes,
)

T = TypeVar("T")


@dataclass(frozen=True)
class ScriptRequest:
    """A Python program on `nodes` times `tasks_per_node` ranks, and the resources that they need.

    Attributes:
        program: what follows `python`.
        gpus_per_node, gpus_per_task: GPUs, requested in one of two ways.
        memory, memory_per_task: such as "64G", of a node or of a task.
        time: the time limit, [days-]hours:minutes:seconds.
        requeue: seconds before the time limit at which the job gets a notice to stop, to be queued again.
        setup: lines of shell that make `python` the one that has dualdist.
        container: an image that has dualdist.
        hosts: host names, for the scheduler ssh.
        handed_on: names of variables whose values the script takes from the shell that submits it.
    """

    program: tuple[str, ...]
    launcher: str
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    cpus_per_task: int = 1
    memory: str | None = None
    memory_per_task: str | None = None
    time: str | None = None
    queue: str | None = None
    account: str | None = None
    setup: tuple[str, ...] = ()
    container: str | None = None
    backend: str | None = None
    transport: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    job_name: str | None = None
    handed_on: tuple[str, ...] = ()
    requeue: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "cpus_per_task"):
            _check_count(name, getattr(self, name), 1)
        for name, minimum in (("gpus_per_node", 0), ("gpus_per_task", 0), ("requeue", 1)):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), minimum)
        self._check_texts()
        for _, message in find_resource_conflicts(vars(self)):
            raise UsageError(message)
        if self.launcher == "torchrun" and self.gpus_per_task:
            raise UsageError(
                f"--gpus-per-task {self.gpus_per_task}: torchrun is one task on each node, and its ranks see all GPUs: "
                f"--gpus-per-node {self.gpus_per_task * self.tasks_per_node}"
            )
        if self.container and self.launcher == "horovodrun":
            raise UsageError(
                "horovodrun starts ranks by ssh, outside of any container: choose another launcher, "
                "the backend horovod runs under all of them"
            )

    def _check_texts(self) -> None:
        if not self.program:
            raise UsageError("a job needs a program: a script, or -m and a module")
        _ = self.memory_mib, self.seconds
        if self.job_name is not None:
            _parse("--job-name", self.job_name, check_job_name)
        for option, text in (("partition", self.queue), ("account", self.account), ("container", self.container)):
            if text is not None:
                _parse(f"--{option}", text, check_word)

    @property
    def size(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def layout(self) -> str:
        """The numbers of nodes and ranks, in words."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        ranks = "1 rank" if self.tasks_per_node == 1 else f"{self.tasks_per_node} ranks"
        return f"{nodes}, {ranks} on each"

    @property
    def title(self) -> str:
        """The job's name, by default the program's. It begins with a letter, as PBS requires."""
        is_module = self.program[0] == "-m" and len(self.program) > 1
        stem = self.program[1].rpartition(".")[2] if is_module else PurePath(self.program[0]).stem
        name = re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._")[:50] or "train"
        return self.job_name or (name if name[0].isalpha() else f"job-{name}")

    @property
    def node_gpus(self) -> int:
        """GPUs on each node."""
        return self.gpus_per_node or (self.gpus_per_task or 0) * self.tasks_per_node

    @property
    def uses_mpi(self) -> bool:
        return registry.needs_mpi(self.backend, self.transport)

    @property
    def memory_mib(self) -> int | None:
        """Memory of one node in MiB; None for the scheduler's default."""
        if self.memory is not None:
            return _parse("--memory", self.memory, parse_mebibytes)
        if self.memory_per_task is not None:
            return _parse("--memory-per-task", self.memory_per_task, parse_mebibytes) * self.tasks_per_node
        return None

    def memory_in(self, giga: str, mega: str) -> str | None:
        """Return the memory of one node in the scheduler's units, such as "64G" or "1500M"."""
        mib = self.memory_mib
        if mib is None:
            return None
        return f"{mib}{mega}" if mib % 1024 else f"{mib // 1024}{giga}"

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds; None for the scheduler's default."""
        return None if self.time is None else _parse("--time", self.time, parse_duration)

    @property
    def clock(self) -> str | None:
        """The time limit as hours:minutes:seconds, which all batch schedulers read alike."""
        return None if self.seconds is None else format_clock(self.seconds)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of every rank."""
        chosen = {BACKEND_VARIABLE: self.backend, TRANSPORT_VARIABLE: self.transport}
        defaults = {"OMP_NUM_THREADS": str(self.cpus_per_task), "PYTHONUNBUFFERED": "1"}
        return {**defaults, **self.env, **{name: value for name, value in chosen.items() if value is not None}}


def format_clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _check_count(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"--{name.replace('_', '-')} {value}: expected a whole number of {minimum} or more")


def _parse(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return parse(text); its ValueError, which says what was expected, becomes a UsageError."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: expected {error}") from error

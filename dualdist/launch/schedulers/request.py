"""What is requested of a scheduler, checked once; times and amounts of memory in the words of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeVar

from dualdist.errors import UsageError
from dualdist.launch import job as units
from dualdist.launch.job import find_resource_conflicts

T = TypeVar("T")


@dataclass(frozen=True)
class ScriptRequest:
    """A Python program on `nodes` times `tasks_per_node` ranks, and what they need.

    `program` is what follows `python`. A rank has `cpus_per_task`; GPUs are asked for per node or per task. `memory` is
    one node's, as "64G"; `time` is [days-]hours:minutes:seconds, and `requeue` how many seconds before it is up the job
    is told to stop, to be queued again. `setup` are lines of shell that make `python` the one with dualdist;
    `container` is an image that has it. `hosts` are for ssh alone.
    `handed_on` names variables whose values the script takes from where it is submitted, and does not hold.
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
        self._check_numbers()
        self._check_words()
        for found in find_resource_conflicts(vars(self)):
            raise UsageError(found.message)
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

    def _check_numbers(self) -> None:
        for name, least in (("nodes", 1), ("tasks_per_node", 1), ("cpus_per_task", 1)):
            _at_least(name, getattr(self, name), least)
        for name in ("gpus_per_node", "gpus_per_task"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
        self.node_memory_mib()
        self.seconds()
        if self.requeue is not None:
            _at_least("requeue", self.requeue, 1)

    def _check_words(self) -> None:
        if not self.program:
            raise UsageError("a job needs a program: a script, or -m and a module")
        if self.job_name is not None:
            _read("--job-name", self.job_name, units.check_job_name)
        for option, text in (("partition", self.queue), ("account", self.account), ("container", self.container)):
            if text is not None:
                _read(f"--{option}", text, units.check_word)

    @property
    def size(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def title(self) -> str:
        """The job's name: as given, or as the program is called. It begins with a letter, as PBS wants it."""
        word = self.program[1] if self.program[0] == "-m" and len(self.program) > 1 else self.program[0]
        stem = word.rpartition(".")[2] if self.program[0] == "-m" else PurePath(word).stem
        known = re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._")[:50] or "train"
        return self.job_name or (known if known[0].isalpha() else f"job-{known}")

    @property
    def node_gpus(self) -> int:
        """GPUs on each node."""
        return self.gpus_per_node or (self.gpus_per_task or 0) * self.tasks_per_node

    def variables(self) -> dict[str, str]:
        """What every rank must find in its environment."""
        chosen = {"DUALDIST_BACKEND": self.backend, "DUALDIST_TRANSPORT": self.transport}
        given = {name: value for name, value in chosen.items() if value is not None}
        own = {"OMP_NUM_THREADS": str(self.cpus_per_task), "PYTHONUNBUFFERED": "1"}
        return {**own, **self.env, **given}

    def node_memory_mib(self) -> int | None:
        """Memory of one node in MiB, None where the scheduler shall choose."""
        if self.memory is not None:
            return _read("--memory", self.memory, units.parse_mebibytes)
        if self.memory_per_task is not None:
            return _read("--memory-per-task", self.memory_per_task, units.parse_mebibytes) * self.tasks_per_node
        return None

    def seconds(self) -> int | None:
        """The time limit, None where the scheduler shall choose."""
        return None if self.time is None else _read("--time", self.time, units.parse_duration)


def format_memory(mib: int, *, giga: str, mega: str) -> str:
    """An amount of memory in the scheduler's own units."""
    return f"{mib}{mega}" if mib % 1024 else f"{mib // 1024}{giga}"


def format_clock(seconds: int) -> str:
    """hours:minutes:seconds, the one form that all batch schedulers read alike."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"--{name.replace('_', '-')} {value}: expected a whole number of {least} or more")


def _read(option: str, text: str, read: Callable[[str], T]) -> T:
    """The text as `read` has it; UsageError where that raises what it expected."""
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: expected {error}") from error

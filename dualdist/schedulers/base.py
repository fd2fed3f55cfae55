"""What is requested of a scheduler, checked once; times and amounts of memory in the words of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from dualdist.errors import UsageError

TIME = re.compile(r"(?:(?P<days>[0-9]{1,4})-)?(?P<hours>[0-9]{1,5}):(?P<minutes>[0-5]?[0-9]):(?P<seconds>[0-5]?[0-9])")
MEMORY = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,3})?)(?P<unit>[KMGT])(?:i?[bB])?")
MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
WORD = re.compile(r"[A-Za-z0-9._/][A-Za-z0-9._:/@+,-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Request:
    """A Python program on `nodes` times `tasks_per_node` ranks, and what they need.

    `program` is what follows `python`. A rank has `cpus_per_task`; GPUs are asked for per node or per task. `memory` is
    one node's, as "64G"; `time` is [days-]hours:minutes:seconds. `setup` are lines of shell that make `python` the one
    with dualdist; `container` is an image that has it. `hosts` are for ssh alone.
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
    name: str = ""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_words()
        if self.launcher == "torchrun" and self.gpus_per_task:
            raise UsageError(
                f"--gpus-per-task {self.gpus_per_task}: torchrun is one task on each node, and its ranks see all GPUs: "
                f"--gpus-per-node {self.gpus_per_task * self.tasks_per_node}"
            )
        if self.gpus_per_node and self.gpus_per_node < self.tasks_per_node:
            raise UsageError(
                f"{self.tasks_per_node} tasks and {self.gpus_per_node} GPUs on each node: two ranks would share a GPU, "
                f"which NCCL refuses; --tasks-per-node {self.gpus_per_node}, or no GPUs"
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
        _one_of("gpus_per_node", self.gpus_per_node, "gpus_per_task", self.gpus_per_task)
        _one_of("memory", self.memory, "memory_per_task", self.memory_per_task)
        self.node_memory_mib()
        self.seconds()

    def _check_words(self) -> None:
        if not self.program:
            raise UsageError("a job needs a program: a script, or -m and a module")
        if self.name and not NAME.fullmatch(self.name):
            raise UsageError(
                f"--job-name {self.name}: expected letters, digits, dots, dashes and underscores, at most 63"
            )
        for option, word in (("partition", self.queue), ("account", self.account), ("container", self.container)):
            if word is not None and not WORD.fullmatch(word):
                raise UsageError(f"--{option} {word!r}: expected one word of letters, digits and ._:/@+-")
        for variable in self.env:
            if not VARIABLE.fullmatch(variable):
                raise UsageError(f"{variable!r} is no name of a variable: expected letters, digits and underscores")

    @property
    def size(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def title(self) -> str:
        """The job's name: as given, or as the program is called."""
        word = self.program[1] if self.program[0] == "-m" and len(self.program) > 1 else self.program[0]
        stem = word.rpartition(".")[2] if self.program[0] == "-m" else PurePath(word).stem
        return self.name or re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._")[:63] or "train"

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
            return mebibytes("--memory", self.memory)
        if self.memory_per_task is not None:
            return mebibytes("--memory-per-task", self.memory_per_task) * self.tasks_per_node
        return None

    def seconds(self) -> int | None:
        """The time limit, None where the scheduler shall choose."""
        return None if self.time is None else duration(self.time)


def duration(text: str) -> int:
    """Seconds of [days-]hours:minutes:seconds. Two numbers alone mean different things to different schedulers."""
    found = TIME.fullmatch(text)
    parts = {name: int(value) for name, value in found.groupdict("0").items()} if found else {}
    seconds = ((parts["days"] * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"] if found else 0
    if seconds == 0:
        raise UsageError(f"--time {text}: expected [days-]hours:minutes:seconds above 0, as 2:00:00 or 1-12:00:00")
    return seconds


def mebibytes(option: str, text: str) -> int:
    """MiB of an amount such as 64G, in powers of 1024, rounded up."""
    found = MEMORY.fullmatch(text)
    amount = float(found["number"]) * MIB[found["unit"]] if found else 0.0
    if amount <= 0:
        raise UsageError(f"{option} {text}: expected a number and a unit of K, M, G or T, as 64G")
    return -int(-amount // 1)


def amount(mib: int, *, giga: str, mega: str) -> str:
    """An amount of memory in the scheduler's own units."""
    return f"{mib}{mega}" if mib % 1024 else f"{mib // 1024}{giga}"


def clock(seconds: int) -> str:
    """hours:minutes:seconds, the one form that all batch schedulers read alike."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"--{name.replace('_', '-')} {value}: expected a whole number of {least} or more")


def _one_of(first: str, one: object, second: str, other: object) -> None:
    if one is not None and other is not None:
        options = [f"--{name.replace('_', '-')} {value}" for name, value in ((first, one), (second, other))]
        raise UsageError(f"{' and '.join(options)} ask for one thing twice: give one of them")

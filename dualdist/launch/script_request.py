"""The request of a job script: the resources of a job, which are options and keys of job files, and its program."""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import PurePath

from dualdist.backends import registry
from dualdist.errors import UsageError
from dualdist.launch.job import BACKEND_VARIABLE, TRANSPORT_VARIABLE
from dualdist.launch.option import (
    as_written,
    lines,
    one_of,
    option,
    parse_duration,
    parse_mebibytes,
    script_name,
    whole,
    word,
)

# Kubeflow's Training Operator (PyTorchJob, MPIJob), and its successor, Trainer (TrainJob).
KUBEFLOW = ("v1", "v2")
# Pairs of resources of which a scheduler takes one.
EXCLUSIVE_RESOURCES = (("gpus_per_node", "gpus_per_task"), ("memory", "memory_per_task"))


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that a job requests from a scheduler, which chooses those that are None.

    `requeue` seconds before the end of the time limit the job gets a notice to stop, and is requeued. `setup` makes
    `python` the one that has dualdist.
    """

    nodes: int | None = option(whole(1), "number of nodes (default: 1)", "N")
    tasks_per_node: int | None = option(whole(1), "ranks on each node (default: one per GPU, else 1)", "N")
    gpus_per_node: int | None = option(whole(0), "GPUs that all ranks of a node see", "N")
    gpus_per_task: int | None = option(whole(0), "GPUs that one rank alone sees", "N")
    cpus_per_task: int | None = option(whole(1), "cores of a rank, and its threads (default: 1)", "N")
    memory: str | None = option(as_written(parse_mebibytes), "memory of a node, such as 64G", "SIZE")
    memory_per_task: str | None = option(as_written(parse_mebibytes), "memory of a rank, such as 8G", "SIZE")
    time: str | None = option(as_written(parse_duration), "the time limit", "[D-]H:MM:SS")
    requeue: int | None = option(whole(1), "stop the job S seconds before the time limit, and requeue it", "S")
    queue: str | None = option(
        word, "the partition or queue", "NAME", flags=("--partition", "--queue"), alias="partition"
    )
    account: str | None = option(word, "the account that is charged", "NAME")
    container: str | None = option(word, "an image for Apptainer or Kubernetes", "IMAGE")
    kubeflow: str | None = option(
        one_of(lambda: KUBEFLOW), "v1: PyTorchJob or MPIJob (default); v2: TrainJob, of Kubeflow Trainer", "V"
    )
    directives: tuple[str, ...] = option(
        lines,
        "a line for the scheduler, as --gres=gpu:a100:4; may be repeated",
        "LINE",
        flags=("--directive",),
        default=(),
    )
    setup: tuple[str, ...] = option(lines, "a line of shell before the job; may be repeated", "LINE", default=())
    job_name: str | None = option(script_name, "the job's name (default: the program's)", "NAME")


@dataclass(frozen=True)
class ScriptRequest(Resources):
    """A Python program on `nodes` times `tasks_per_node` ranks, and the resources that they need.

    Attributes:
        program: what follows `python`.
        hosts: host names, for the scheduler ssh.
        handed_on: names of variables whose values the script takes from the shell that submits it.
    """

    program: tuple[str, ...]
    launcher: str
    _: KW_ONLY
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    backend: str | None = None
    transport: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    handed_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for one, other in EXCLUSIVE_RESOURCES:
            values = getattr(self, one), getattr(self, other)
            if None not in values:
                raise UsageError(f"{one} {values[0]} and {other} {values[1]} request the same resource: give one")
        if self.gpus_per_node and self.gpus_per_node < self.tasks_per_node:
            raise UsageError(
                f"{self.tasks_per_node} tasks and {self.gpus_per_node} GPUs on each node: two ranks would share a GPU, "
                f"which NCCL refuses; request {self.gpus_per_node} tasks, or no GPUs"
            )
        if self.requeue is not None and self.seconds is not None and self.seconds <= self.requeue:
            raise UsageError(f"requeue {self.requeue}: the job has {self.seconds} seconds; expected fewer than that")

    @property
    def size(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def layout(self) -> str:
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
        return self.gpus_per_node or (self.gpus_per_task or 0) * self.tasks_per_node

    @property
    def uses_mpi(self) -> bool:
        return registry.needs_mpi(self.backend, self.transport)

    @property
    def memory_mib(self) -> int | None:
        """Memory of one node in MiB; None for the scheduler's default."""
        if self.memory is not None:
            return parse_mebibytes(self.memory)
        if self.memory_per_task is not None:
            return parse_mebibytes(self.memory_per_task) * self.tasks_per_node
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
        return None if self.time is None else parse_duration(self.time)

    @property
    def clock(self) -> str | None:
        """The time limit as hours:minutes:seconds, which all batch schedulers read alike."""
        seconds = self.seconds
        return None if seconds is None else f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def variables(self) -> dict[str, str]:
        chosen = {BACKEND_VARIABLE: self.backend, TRANSPORT_VARIABLE: self.transport}
        defaults = {"OMP_NUM_THREADS": str(self.cpus_per_task), "PYTHONUNBUFFERED": "1"}
        return {**defaults, **self.env, **{name: value for name, value in chosen.items() if value is not None}}

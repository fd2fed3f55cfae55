"""What a job file may say: every key, its type and its meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dualdist.launch import units

LauncherName = Literal["torchrun", "horovodrun", "horovodrun-mpi", "mpirun", "srun", "jsrun", "spawn", "python"]
BackendName = Literal["native", "horovod", "mpi", "auto"]
TransportName = Literal["gloo", "shm", "mpi", "nccl"]


def _as(read: Callable[[str], object]) -> AfterValidator:
    """A text that can be read so, as it is written."""

    def check(text: str) -> str:
        read(text)
        return text

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Word = Annotated[str, _as(units.word)]
Memory = Annotated[str, _as(units.mebibytes)]


def _listed(value: Any) -> Any:
    """A single word stands for a list of one; "a:2,b:2" for two."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def _block(value: Any) -> Any:
    """The lines of a block of text."""
    return value.splitlines() if isinstance(value, str) else value


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Resources(_Part):
    """What a scheduler is asked for; each is left to the scheduler where it is None.

    `memory` is one node's, as "64G"; GPUs and memory can be asked for per task instead. `time` is
    "[days-]hours:minutes:seconds", and `requeue` how many seconds before it is up the job is told to stop, to be queued
    again; `setup` are lines of shell before the job, such as `module load openmpi`;
    `container` is an image.
    """

    nodes: Count | None = None
    tasks_per_node: Count | None = None
    gpus_per_node: Natural | None = None
    gpus_per_task: Natural | None = None
    cpus_per_task: Count | None = None
    memory: Memory | None = None
    memory_per_task: Memory | None = None
    time: Annotated[str, _as(units.duration)] | None = None
    partition: Word | None = None
    queue: Word | None = None
    account: Word | None = None
    job_name: Annotated[str, _as(units.job_name)] | None = None
    requeue: Count | None = None
    setup: Annotated[tuple[str, ...], BeforeValidator(_block), Field(strict=False)] = ()
    container: Word | None = None


class JobFile(_Part):
    """A job file that has passed its checks.

    `program` is a script and `module` a module, one of which runs with `args`; `ranks`, also written `np`, is the
    number of ranks, None for one a slot of the hosts. `timeout`, `max_restarts` and `min_ranks` are as for
    `dualdist run`.
    """

    program: Text | None = None
    module: Text | None = None
    args: tuple[str, ...] = Field(default=(), strict=False)
    as_horovod: bool = False
    ranks: Count | None = None
    min_ranks: Count | None = None
    launcher: LauncherName | None = None
    backend: BackendName | None = None
    transport: TransportName | None = None
    hosts: Annotated[tuple[Text, ...], BeforeValidator(_listed), Field(strict=False)] = ()
    hostfile: Text | None = None
    network_interface: Text | None = None
    env: dict[Annotated[str, _as(units.variable)], str] = Field(default_factory=dict)
    max_restarts: Natural = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    log_dir: Text | None = None
    tag_output: bool = False
    resources: Resources = Field(default_factory=Resources)


# Other spellings of keys.
ALIASES = {"np": "ranks", "script": "program"}
# Where values, and what lists and mappings hold, stay as they are written, such as 010 or 1e-3.
RESOURCES_WORDS = ("memory", "memory_per_task", "time", "partition", "queue", "account", "job_name")
WORDS = (("args",), ("env",), *(("resources", key) for key in RESOURCES_WORDS))

"""What a job file may say: every key, its type and its meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LauncherName = Literal["torchrun", "horovodrun", "horovodrun-mpi", "mpirun", "srun", "spawn", "python"]
BackendName = Literal["native", "horovod", "mpi", "auto"]
TransportName = Literal["gloo", "shm", "mpi", "nccl"]

Count = Annotated[int, Field(ge=1, strict=True)]
Text = Annotated[str, Field(min_length=1)]


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
    "[days-]hours:minutes:seconds"; `setup` are lines of shell before the job, such as `module load openmpi`;
    `container` is an image.
    """

    nodes: Count | None = None
    tasks_per_node: Count | None = None
    gpus_per_node: Annotated[int, Field(ge=0, strict=True)] | None = None
    gpus_per_task: Annotated[int, Field(ge=0, strict=True)] | None = None
    cpus_per_task: Count | None = None
    memory: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[KMGT]?i?[bB]?$")] | None = None
    memory_per_task: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[KMGT]?i?[bB]?$")] | None = None
    time: Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}$")] | None = None
    partition: Text | None = None
    queue: Text | None = None
    account: Text | None = None
    setup: Annotated[tuple[str, ...], BeforeValidator(_block), Field(strict=False)] = ()
    container: Text | None = None


class JobFile(_Part):
    """A job file that has passed its checks.

    `program` is a script and `module` a module, one of which runs with `args`; `ranks`, also written `np`, is the
    number of ranks, None for one a slot of the hosts. `timeout` and `max_restarts` are as for `dualdist run`.
    """

    program: Text | None = None
    module: Text | None = None
    args: tuple[str, ...] = Field(default=(), strict=False)
    as_horovod: bool = False
    ranks: Count | None = None
    launcher: LauncherName | None = None
    backend: BackendName | None = None
    transport: TransportName | None = None
    hosts: Annotated[tuple[Text, ...], BeforeValidator(_listed), Field(strict=False)] = ()
    hostfile: Text | None = None
    network_interface: Text | None = None
    env: dict[str, str] = Field(default_factory=dict)
    max_restarts: Annotated[int, Field(ge=0, strict=True)] = 0
    timeout: Annotated[float, Field(gt=0, strict=False)] | None = None
    log_dir: Text | None = None
    tag_output: bool = False
    resources: Resources = Field(default_factory=Resources)


# Other spellings of keys.
ALIASES = {"np": "ranks", "script": "program"}
# Where values, and what lists and mappings hold, stay as they are written, such as 010 or 1e-3.
WORDS = (("args",), ("env",), ("resources", "memory"), ("resources", "time"))

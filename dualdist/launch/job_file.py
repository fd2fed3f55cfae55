"""From the text of a job file to a JobFile, or to an error in which every sentence names file and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dualdist.errors import UsageError
from dualdist.launch import hosts as host_lists
from dualdist.launch import job as units
from dualdist.launch.job import (
    Host,
    JobChoices,
    find_conflicts,
    find_resource_conflicts,
    layout_error,
    min_ranks_error,
    slots_error,
)
from dualdist.utils.suggest import did_you_mean

# The keys and indices that lead from the top of the file to a value.
KeyPath: TypeAlias = tuple[str | int, ...]

# Plain words as YAML 1.2 reads them: in 1.1, which PyYAML speaks, `on` is a boolean and 2:00:00 the number 7200.
PLAIN: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"(?:~|null|Null|NULL|)$"), lambda text: None),
    (re.compile(r"(?:true|True|TRUE)$"), lambda text: True),
    (re.compile(r"(?:false|False|FALSE)$"), lambda text: False),
    (re.compile(r"[-+]?[0-9]{1,18}$"), int),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"), float),
)


class YamlError(Exception):
    """The text is no YAML, or says one thing twice; `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class YamlDocument:
    """What a YAML file says. `words` has the scalars as they are written, for those who want no numbers."""

    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    words: dict[KeyPath, str] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """The line of the value, or of the nearest that holds it."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 1)


def read(text: str) -> YamlDocument:
    """The only document of the text; None where it is empty. Raises YamlError."""
    document = YamlDocument(None)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = None if node is None else _value(node, (), document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(f"not YAML: {error.problem or error.context}", mark.line + 1 if mark else 1) from error
    except yaml.YAMLError as error:
        raise YamlError(f"not YAML: {' '.join(str(error).split())}", 1) from error
    except RecursionError as error:
        raise YamlError("lists and mappings stand too deep in one another, or one is an alias of itself", 1) from error
    return replace(document, value=value)


def _value(node: yaml.Node, path: KeyPath, into: YamlDocument) -> Any:
    into.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return dict(_items(node, path, into))
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*path, index), into) for index, child in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    if "\0" in node.value:
        raise YamlError("a text with a zero byte: no program can be told it", node.start_mark.line + 1)
    into.words[path] = node.value
    if node.style is not None:  # quoted, or a block
        return node.value
    return next((parse(node.value) for pattern, parse in PLAIN if pattern.match(node.value)), node.value)


def _items(node: yaml.MappingNode, path: KeyPath, into: YamlDocument) -> Iterator[tuple[str, Any]]:
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise YamlError("a key is a word, not a list or a mapping", line)
        name = str(key.value)
        if name in seen:
            raise YamlError(f"{name!r} is given twice, first on line {seen[name]}", line)
        seen[name] = line
        here = (*path, name)
        into.lines[here] = line
        yield name, _value(value, here, into)


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
Word = Annotated[str, _as(units.check_word)]
Memory = Annotated[str, _as(units.parse_mebibytes)]


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
    time: Annotated[str, _as(units.parse_duration)] | None = None
    partition: Word | None = None
    queue: Word | None = None
    account: Word | None = None
    job_name: Annotated[str, _as(units.check_job_name)] | None = None
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
    env: dict[Annotated[str, _as(units.check_variable_name)], str] = Field(default_factory=dict)
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


# What each kind of wrong value should have been, by pydantic's name for the mistake.
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number of seconds",
    "finite_number": "a number of seconds",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of names to values",
    "string_too_short": "a text that is not empty",
}


def load(path: Path, *, horovod_has_mpi: bool | None = None) -> JobFile:
    """The job of a YAML file. UsageError tells all that is wrong with it, one sentence a line, each with its line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path}: cannot read this job file: {why}") from error
    return loads(text, str(path), horovod_has_mpi=horovod_has_mpi)


def loads(text: str, name: str, *, horovod_has_mpi: bool | None = None) -> JobFile:
    """As load(), from a text; `name` is the file in errors."""
    try:
        document = read(text)
        values = _settings(document)
    except YamlError as error:
        raise UsageError(f"{name}:{error.line}: {error}") from error
    try:
        job = JobFile.model_validate(values)
    except ValidationError as error:
        found = {(document.line(path), sentence) for path, sentence in _sentences(error)}
        raise UsageError("\n".join(f"{name}:{line}: {sentence}" for line, sentence in sorted(found))) from error
    wrong = sorted((document.line(path), sentence) for path, sentence in _contradictions(job, horovod_has_mpi))
    if wrong:
        raise UsageError("\n".join(f"{name}:{line}: {sentence}" for line, sentence in wrong))
    return job


def _settings(document: YamlDocument) -> dict[str, Any]:
    """The top of the file, by the keys' own names."""
    if document.value is None:
        return {}
    if not isinstance(document.value, Mapping):
        raise YamlError("a job file is a mapping, as `program: train.py` on one line and `ranks: 2` on the next", 1)
    values = dict(document.value)
    for alias, key in ALIASES.items():
        if alias in values:
            if key in values:
                raise YamlError(f"{alias!r} is another name of {key!r}: give one of them", document.line((alias,)))
            values[key] = values.pop(alias)
            document.lines[(key,)] = document.lines[(alias,)]
    return _as_written(values, document, ())


def _as_written(values: dict[str, Any], document: YamlDocument, at: KeyPath) -> dict[str, Any]:
    """The mapping at this path, with words where numbers would lose how they were written."""
    found = dict(values)
    for key, inside in values.items():
        path = (*at, key)
        if isinstance(inside, list) and path in WORDS:
            found[key] = [document.words.get((*path, index), value) for index, value in enumerate(inside)]
        elif isinstance(inside, Mapping):
            within = {name: document.words.get((*path, name), value) for name, value in inside.items()}
            found[key] = within if path in WORDS else _as_written(dict(inside), document, path)
        elif path in WORDS and inside is not None:
            found[key] = document.words[path]
    return found


def _sentences(error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    for mistake in error.errors():
        path, kind, seen = mistake["loc"], mistake["type"], mistake["input"]
        key = ".".join(str(part) for part in path)
        if kind == "extra_forbidden":
            yield path, _unknown(path)
            continue
        expected, hint = EXPECTED.get(kind, mistake["msg"]), ""
        context = mistake.get("ctx", {})
        if kind == "literal_error":
            expected = f"one of {', '.join(_choices(path))}"
            hint = did_you_mean(seen, _choices(path))
        elif kind == "value_error":
            expected = str(context["error"])
        elif kind == "greater_than_equal":
            expected = f"{context['ge']} or more"
        elif kind == "greater_than":
            expected = f"more than {context['gt']:g}"
        if path[-1] == "[key]":
            path, key = path[:-1], str(path[0])
        yield path, f"{key}: expected {expected}, not {_shown(seen)}{hint}"


def _unknown(path: tuple[str | int, ...]) -> str:
    """The sentence for a key that nobody reads, with the one that may have been meant."""
    known = list(_model(path).model_fields)
    if len(path) == 1:
        known += ALIASES
        if path[0] in _model(("resources", "")).model_fields:
            return f"unknown key {path[0]!r}: it belongs under resources:"
    hint = did_you_mean(str(path[-1]), known).removeprefix("; ") or f"expected one of {', '.join(known)}"
    return f"unknown key {'.'.join(map(str, path))!r}: {hint}"


def _model(path: tuple[str | int, ...]) -> type[BaseModel]:
    """The part of the schema in which the last key of the path is looked for."""
    if len(path) == 1:
        return JobFile
    part = JobFile.model_fields[str(path[0])].annotation
    assert isinstance(part, type)
    assert issubclass(part, BaseModel)
    return part


def _choices(path: tuple[str | int, ...]) -> list[str]:
    schema = JobFile.model_json_schema()["properties"][str(path[0])]
    return [name for option in schema.get("anyOf", [schema]) for name in option.get("enum", ())]


def _shown(seen: Any) -> str:
    if seen is None:
        return "nothing"
    if isinstance(seen, bool):
        return str(seen).lower()
    if isinstance(seen, dict):
        return "a mapping"
    return "a list" if isinstance(seen, (list, tuple)) else repr(seen)


def _contradictions(job: JobFile, horovod_has_mpi: bool | None) -> Iterator[tuple[KeyPath, str]]:
    if job.program is not None and job.module is not None:
        yield ("module",), "program and module both say what to run: give one of them"
    if job.hosts and job.hostfile is not None:
        yield ("hostfile",), "hosts and hostfile both say where to run: give one of them"
    hosts: list[Host] = []
    resources = job.resources.model_dump()
    for number, text in enumerate(job.hosts):
        try:
            hosts += host_lists.parse_hosts(text)
        except UsageError as error:
            yield ("hosts", number), str(error)
    if job.ranks is not None and (why := slots_error(job.ranks, hosts)):
        yield ("ranks",), why
    if job.ranks is not None and (why := min_ranks_error(job.min_ranks, job.ranks)):
        yield ("min_ranks",), why
    if why := layout_error(job.ranks, resources["nodes"], resources["tasks_per_node"]):
        yield ("resources", "nodes"), why
    for found in find_resource_conflicts(resources):
        yield ("resources", found.setting), found.message
    has_hosts = bool(job.hosts or job.hostfile)
    choice = JobChoices(job.launcher, job.backend, job.transport, job.ranks, has_hosts, job.min_ranks)
    for found in find_conflicts(choice, horovod_has_mpi=horovod_has_mpi):
        yield (found.setting,), found.message

"""Job files: YAML checked against a schema, with the file and line of every error."""

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from dualdist.backends import registry
from dualdist.errors import UsageError
from dualdist.launch.hosts import parse_hosts, read_text
from dualdist.launch.job import (
    Host,
    check_job_name,
    check_variable_name,
    check_word,
    find_resource_conflicts,
    layout_error,
    min_ranks_error,
    parse_duration,
    parse_mebibytes,
    slots_error,
)
from dualdist.launch.launchers import ALL, LAUNCHERS, find_conflicts
from dualdist.utils.suggest import did_you_mean

# The keys and indices from the top of the file to a value.
KeyPath: TypeAlias = tuple[str | int, ...]
NULL = ("~", "null", "Null", "NULL", "")
MAX_VALUES = 10_000


@dataclass
class YamlDocument:
    """The value of a YAML file, with the line of each part; `name` is the file in errors.

    Every scalar is a string as it is written, or None: the schema converts it. YAML 1.1, which PyYAML implements, would
    read `on` as a boolean and 2:00:00 as the number 7200.
    """

    name: str
    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def error(self, line: int, message: str) -> UsageError:
        return UsageError(f"{self.name}:{line}: {message}")

    def line(self, path: KeyPath) -> int:
        """Return the line of the value, or of the closest parent with one."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 1)

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the value of a node, and record its lines."""
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if len(self.lines) > MAX_VALUES:
            raise self.error(line, f"more than {MAX_VALUES} values: do aliases repeat a list that repeats others?")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(child, (*path, index)) for index, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        if "\0" in node.value:
            raise self.error(line, "a string with a NUL byte: no program can take it as an argument")
        is_text = len(path) > 1 and path[0] in ("args", "env")  # as it is written, whatever it says
        return None if node.style is None and node.value in NULL and not is_text else node.value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self.error(line, "a key is a word, not a list or a mapping")
            name = str(key.value)
            child = (*path, name)
            if name in found:
                raise self.error(line, f"{name!r} is given twice, first on line {self.lines[child]}")
            self.lines[child] = line
            found[name] = self.convert(value, child)
        return found


def read_yaml(text: str, name: str) -> YamlDocument:
    """Return the only document of the text; UsageError if it is none."""
    document = YamlDocument(name)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document.value = None if node is None else document.convert(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise document.error(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise document.error(1, f"not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise document.error(1, "lists and mappings are nested too deep, or one is an alias of itself") from error
    return document


def _registered(names: Callable[[], Sequence[str]]) -> AfterValidator:
    """Accept the names known when a file is read, with pydantic's message for others."""

    def check(text: str) -> str:
        *others, last = map(repr, names())
        if repr(text) not in (*others, last):
            raise PydanticCustomError("literal_error", f"Input should be {', '.join(others)} or {last}")
        return text

    return AfterValidator(check)


LauncherName = Annotated[str, _registered(lambda: tuple(ALL))]
BackendName = Annotated[str, _registered(registry.choices)]
TransportName = Annotated[str, _registered(registry.transports)]


def _checked_by(parse: Callable[[str], object]) -> AfterValidator:
    """Keep a text as it is written, if parse(text) raises nothing."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _split(split: Callable[[str], list[str]]) -> BeforeValidator:
    """Accept a text for a list."""
    return BeforeValidator(lambda value: split(value) if isinstance(value, str) else value)


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Flag = Annotated[
    bool, Field(strict=True), BeforeValidator(lambda text: {"true": True, "false": False}.get(str(text).lower(), text))
]
Text = Annotated[str, Field(min_length=1)]
Word = Annotated[str, _checked_by(check_word)]
Memory = Annotated[str, _checked_by(parse_mebibytes)]


class Resources(BaseModel, frozen=True, extra="forbid"):
    """Resources requested from a scheduler, which chooses what is None.

    `memory`, such as "64G", is per node. `time` is [days-]hours:minutes:seconds; `requeue` seconds before its end the
    job gets a notice to stop, and is queued again. `setup` are lines of shell before the job; `container` is an image.
    `kubeflow` is the version of Kubeflow's API on Kubernetes.
    """

    nodes: Count | None = None
    tasks_per_node: Count | None = None
    gpus_per_node: Natural | None = None
    gpus_per_task: Natural | None = None
    cpus_per_task: Count | None = None
    memory: Memory | None = None
    memory_per_task: Memory | None = None
    time: Annotated[str, _checked_by(parse_duration)] | None = None
    partition: Word | None = None
    queue: Word | None = None
    account: Word | None = None
    job_name: Annotated[str, _checked_by(check_job_name)] | None = None
    requeue: Count | None = None
    setup: Annotated[tuple[str, ...], _split(str.splitlines)] = ()
    container: Word | None = None
    kubeflow: Literal["v1", "v2"] | None = None


class JobFile(BaseModel, frozen=True, extra="forbid"):
    """The options of `dualdist run` in a file.

    Either a script, `program`, or a `module` runs with `args`. `ranks` are by default one per slot of the hosts.
    """

    program: Text | None = None
    module: Text | None = None
    args: tuple[str, ...] = ()
    as_horovod: Flag = False
    ranks: Count | None = None
    min_ranks: Count | None = None
    launcher: LauncherName | None = None
    backend: BackendName | None = None
    transport: TransportName | None = None
    hosts: Annotated[tuple[Text, ...], _split(lambda text: text.split(","))] = ()
    hostfile: Text | None = None
    network_interface: Text | None = None
    env: dict[Annotated[str, _checked_by(check_variable_name)], str] = Field(default_factory=dict)
    max_restarts: Natural = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    log_dir: Text | None = None
    tag_output: Flag = False
    resources: Resources = Field(default_factory=Resources)


def load(path: Path, *, is_script: bool = False, horovod_has_mpi: bool | None = None) -> JobFile:
    """Read a job file; see loads()."""
    text = read_text(path, "job file")
    return loads(text, str(path), is_script=is_script, horovod_has_mpi=horovod_has_mpi)


def loads(text: str, name: str, *, is_script: bool = False, horovod_has_mpi: bool | None = None) -> JobFile:
    """Read a job file from a text, which may name any launcher if it `is_script`, for a scheduler.

    UsageError has one line for each error of the file `name`, which begins with file and line.
    """
    document = read_yaml(text, name)
    if not isinstance(document.value, Mapping | None):
        expected = "a mapping, as `program: train.py` on one line and `ranks: 2` on the next"
        raise document.error(1, f"a job file is {expected}")
    try:
        job = JobFile.model_validate(document.value or {})
    except ValidationError as error:
        raise UsageError(_format_errors(document, _schema_errors(error))) from error
    if errors := _format_errors(document, _conflicts(job, is_script, horovod_has_mpi)):
        raise UsageError(errors)
    return job


def _format_errors(document: YamlDocument, errors: Iterator[tuple[KeyPath, str]]) -> str:
    found = sorted({(document.line(path), message) for path, message in errors})
    return "\n".join(str(document.error(line, message)) for line, message in found)


def _schema_errors(error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    """Yield pydantic's messages, with the value, and the closest valid word if there is one."""
    for details in error.errors():
        path, kind, value = details["loc"], details["type"], details["input"]
        if kind == "extra_forbidden":
            yield path, _unknown_key(path)
            continue
        message, hint = details["msg"][0].lower() + details["msg"][1:], ""
        if kind == "value_error":
            message = f"expected {details['ctx']['error']}"
        elif kind == "literal_error":
            hint = did_you_mean(value, re.findall(r"'([\w-]+)'", details["msg"]))
        key = ".".join(map(str, path[:-2] if path[-1] == "[key]" else path))
        shown = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else reprlib.repr(value)
        yield path, f"{key}: {message}; got {shown}{hint}"


def _unknown_key(path: KeyPath) -> str:
    schema = JobFile if len(path) == 1 else Resources
    known = list(schema.model_fields)
    if schema is JobFile and path[0] in Resources.model_fields:
        return f"unknown key {path[0]!r}: it belongs under resources:"
    hint = did_you_mean(str(path[-1]), known).removeprefix("; ") or f"expected one of {', '.join(known)}"
    return f"unknown key {'.'.join(map(str, path))!r}: {hint}"


def _conflicts(job: JobFile, is_script: bool, horovod_has_mpi: bool | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield what the schema cannot express: options that exclude each other."""
    if job.program is not None and job.module is not None:
        yield ("module",), "program and module both say what to run: give one of them"
    if job.hosts and job.hostfile is not None:
        yield ("hostfile",), "hosts and hostfile both say where to run: give one of them"
    hosts: list[Host] = []
    for number, text in enumerate(job.hosts):
        try:
            hosts += parse_hosts(text)
        except UsageError as error:
            yield ("hosts", number), str(error)
    if job.ranks is not None and (message := slots_error(job.ranks, hosts)):
        yield ("ranks",), message
    if job.ranks is not None and (message := min_ranks_error(job.min_ranks, job.ranks)):
        yield ("min_ranks",), message
    resources = job.resources.model_dump()
    if message := layout_error(job.ranks, resources["nodes"], resources["tasks_per_node"]):
        yield ("resources", "nodes"), message
    for setting, message in find_resource_conflicts(resources):
        yield ("resources", setting), message
    for setting, message in find_conflicts(
        job.launcher,
        job.backend,
        job.transport,
        ranks=job.ranks,
        has_hosts=bool(job.hosts or job.hostfile),
        min_ranks=job.min_ranks,
        horovod_has_mpi=horovod_has_mpi,
        launchers=(ALL if is_script else LAUNCHERS).keys(),
    ):
        yield (setting,), message

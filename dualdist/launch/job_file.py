"""From the text of a job file to a JobFile, or to an error in which every sentence names file and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dualdist.errors import UsageError
from dualdist.launch import hosts as host_lists
from dualdist.launch import yaml_lines
from dualdist.launch.job import Host, cannot_keep, too_few_slots
from dualdist.launch.option_conflicts import Choice, impossible, impossible_resources, unfit
from dualdist.launch.schema import ALIASES, WORDS, JobFile
from dualdist.launch.yaml_lines import Document, YamlError
from dualdist.utils.suggest import meant

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
        document = yaml_lines.read(text)
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


def _settings(document: Document) -> dict[str, Any]:
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


def _as_written(values: dict[str, Any], document: Document, at: yaml_lines.Path) -> dict[str, Any]:
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


def _sentences(error: ValidationError) -> Iterator[tuple[yaml_lines.Path, str]]:
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
            hint = meant(seen, _choices(path))
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
    hint = meant(str(path[-1]), known).removeprefix("; ") or f"expected one of {', '.join(known)}"
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


def _contradictions(job: JobFile, horovod_has_mpi: bool | None) -> Iterator[tuple[yaml_lines.Path, str]]:
    if job.program is not None and job.module is not None:
        yield ("module",), "program and module both say what to run: give one of them"
    if job.hosts and job.hostfile is not None:
        yield ("hostfile",), "hosts and hostfile both say where to run: give one of them"
    hosts: list[Host] = []
    resources = job.resources.model_dump()
    for number, text in enumerate(job.hosts):
        try:
            hosts += host_lists.parse(text)
        except UsageError as error:
            yield ("hosts", number), str(error)
    if job.ranks is not None and (why := too_few_slots(job.ranks, hosts)):
        yield ("ranks",), why
    if job.ranks is not None and (why := cannot_keep(job.min_ranks, job.ranks)):
        yield ("min_ranks",), why
    if why := unfit(job.ranks, resources["nodes"], resources["tasks_per_node"]):
        yield ("resources", "nodes"), why
    for found in impossible_resources(resources):
        yield ("resources", found.setting), found.message
    has_hosts = bool(job.hosts or job.hostfile)
    choice = Choice(job.launcher, job.backend, job.transport, job.ranks, has_hosts, job.min_ranks)
    for found in impossible(choice, horovod_has_mpi=horovod_has_mpi):
        yield (found.setting,), found.message

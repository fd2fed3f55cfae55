"""Job files: YAML with the options of a RunRequest, and the file and line of every error."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from dualdist.errors import UsageError
from dualdist.launch.hosts import read_text
from dualdist.launch.option import options_of
from dualdist.launch.run_request import RunRequest
from dualdist.launch.script_request import Resources
from dualdist.utils.suggest import did_you_mean

# The keys and indices from the top of the file to a value.
KeyPath: TypeAlias = tuple[str | int, ...]
NULL = ("~", "null", "Null", "NULL", "")
MAX_VALUES = 10_000


@dataclass
class YamlDocument:
    """The value of a YAML file, with the line of each part; `name` is the file in errors.

    Every scalar is a string as it is written, or None: the options convert it. YAML 1.1, which PyYAML implements, would
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


def load(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a job file; see loads()."""
    return loads(read_text(path, "job file"), str(path))


def loads(text: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that a text gives to options of RunRequest, and where: file and line, which begin an error.

    UsageError has one such line for each error of the file `name`.
    """
    document = read_yaml(text, name)
    if not isinstance(document.value, Mapping | None):
        expected = "a mapping, as `program: train.py` on one line and `ranks: 2` on the next"
        raise document.error(1, f"a job file is {expected}")
    given = dict(document.value or {})
    resources = given.pop("resources", None)
    errors: set[tuple[int, str]] = set()
    values = _read_values(document, RunRequest, (), given, errors)
    if resources is not None and not isinstance(resources, Mapping):
        errors.add((document.line(("resources",)), "resources: expected a mapping, as `nodes: 2` on an indented line"))
    elif resources is not None:
        values["resources"] = _read_values(document, Resources, ("resources",), resources, errors)
    for one, other, what in (("program", "module", "what"), ("hosts", "hostfile", "where")):
        if one in values and other in values:
            errors.add((document.line((other,)), f"{one} and {other} both say {what} to run: give one of them"))
    if errors:
        raise UsageError("\n".join(str(document.error(line, message)) for line, message in sorted(errors)))
    return values, {key: f"{name}:{document.line((key,))}: " for key in values}


def _read_values(
    document: YamlDocument, kind: type, parent: tuple[str, ...], given: Mapping[str, Any], errors: set[tuple[int, str]]
) -> dict[str, Any]:
    """Return the values of a mapping of options, without those that are null; add what is wrong to `errors`."""
    options, values = options_of(kind), {}
    names = {key: name for name, spec in options.items() for key in (name, spec.alias) if key}
    for key, value in given.items():
        path = (*parent, key)
        if key not in names:
            errors.add((document.line(path), _unknown_key(path, names)))
        elif names[key] in values:
            errors.add(
                (document.line(path), f"{options[names[key]].alias} and {names[key]} are the same: give one of them")
            )
        elif value is not None:
            try:
                values[names[key]] = options[names[key]].value(".".join(path), value)
            except UsageError as error:
                errors.add((document.line(path), str(error)))
    return values


def _unknown_key(path: Sequence[str], known: Iterable[str]) -> str:
    if len(path) == 1 and path[0] in options_of(Resources):
        return f"unknown key {path[0]!r}: it belongs under resources:"
    known = [*known, "resources"] if len(path) == 1 else list(known)
    hint = did_you_mean(path[-1], known).removeprefix("; ") or f"expected one of {', '.join(known)}"
    return f"unknown key {'.'.join(path)!r}: {hint}"

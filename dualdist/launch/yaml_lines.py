"""YAML as plain values, together with the line on which each of them stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import yaml

# The keys and indices that lead from the top of the file to a value.
Path: TypeAlias = tuple[str | int, ...]

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
class Document:
    """What a YAML file says. `words` has the scalars as they are written, for those who want no numbers."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    words: dict[Path, str] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """The line of the value, or of the nearest that holds it."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 1)


def read(text: str) -> Document:
    """The only document of the text; None where it is empty. Raises YamlError."""
    document = Document(None)
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


def _value(node: yaml.Node, path: Path, into: Document) -> Any:
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


def _items(node: yaml.MappingNode, path: Path, into: Document) -> Iterator[tuple[str, Any]]:
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

"""Generated parts of the manual: `{{ command_line }}` and `{{ job_file }}` are replaced in a page's text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from dualdist.cli import COMMANDS, build_parser
from dualdist.cli.bench import BENCHMARKS
from dualdist.launch.job_file import JobFile, Resources


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for each page."""
    for name, make in (("command_line", command_line), ("job_file", job_file)):
        if (mark := f"{{{{ {name} }}}}") in markdown:
            markdown = markdown.replace(mark, "\n".join(make()))
    return markdown


def command_line() -> Iterator[str]:
    """Yield a section for each sub-command, from its parser."""
    for name, (_, summary) in COMMANDS.items():
        parser = subparser(build_parser(name), name)
        yield f"\n## dualdist {name}\n\n{summary[0].upper()}{summary[1:]}.\n"
        if name != "bench":
            yield from options(parser)
            continue
        for benchmark, text in BENCHMARKS.items():
            yield f"\n### dualdist bench {benchmark}\n\n{text[0].upper()}{text[1:]}.\n"
            yield from options(subparser(parser, benchmark))


def subparser(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    found: argparse.ArgumentParser = action.choices[name]
    return found


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a parser's usage, a table for each group of its options, and its exit codes."""
    usage = parser.usage or f"{parser.prog} [option ...]"
    yield f"```text\n{usage}\n```\n"
    for group in parser._action_groups:
        shown = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
        if not shown:
            continue
        title = (group.title or "").capitalize()
        yield f"\n**{title}**{': ' + group.description if group.description else ''}\n\n| | |\n|---|---|"
        for action in shown:
            text = parser._get_formatter()._expand_help(action) if action.help else ""
            yield f"| {cell(', '.join(f'`{word}`' for word in invocations(action)))} | {cell(text)} |"
    yield f"\n{parser.epilog or ''}\n"


def invocations(action: argparse.Action) -> list[str]:
    """Return the forms of an option, each with its value."""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    metavar = action.metavar if isinstance(action.metavar, str) else choices or action.dest.upper()
    if not action.option_strings:
        return [metavar]
    return [option if action.nargs == 0 else f"{option} {metavar}" for option in action.option_strings]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def job_file() -> Iterator[str]:
    """Yield a table of the keys of a job file, and one of those under `resources`, from the schema."""
    helps = {action.dest: action.help or "" for action in subparser(build_parser("run"), "run")._actions} | HELPS
    for title, schema in (("Keys", JobFile), ("Keys under `resources`", Resources)):
        yield f"\n## {title}\n\n| key | type | meaning |\n|---|---|---|"
        for key, described in schema.model_json_schema()["properties"].items():
            yield f"| `{key}` | {cell(kind(described))} | {cell(helps[key])} |"


def kind(schema: dict[str, Any]) -> str:
    """Return a JSON schema's type in words."""
    if "anyOf" in schema:
        return " or ".join(kind(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "$ref" in schema:
        return "a mapping, see below"
    if schema.get("type") == "array":
        return f"a list of {kind(schema['items'])}s"
    if schema.get("type") == "object":
        return f"a mapping of names to {kind(schema['additionalProperties'])}s"
    bound = next((f", {sign} {schema[key]}" for key, sign in BOUNDS.items() if key in schema), "")
    return f"{NAMES[schema['type']]}{bound}"


NAMES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above"}
HELPS = {
    "program": "the script",
    "module": "the module, as for python -m",
    "args": "its arguments",
    "env": "variables of every rank",
    "resources": "what a scheduler needs",
    "queue": "the queue",
    "partition": "the partition",
    "setup": "lines of shell before the job",
}

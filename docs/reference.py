"""Write the generated parts of the manual's pages, from `<!-- generated: ... -->` to `<!-- end -->`.

    python docs/reference.py          # rewrite the pages
    python docs/reference.py --check  # change nothing; exit with 1 if a page is out of date

A mark says what follows it: names in dualdist, each with the members to show in parentheses, `*` for all methods; or
`errors`, `command line` or `job file`. griffe reads the docstrings without imports; options come from the parsers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

from dualdist.cli import COMMANDS, build_parser
from dualdist.cli.bench import BENCHMARKS
from dualdist.launch.option import options_of
from dualdist.launch.run_request import RunRequest
from dualdist.launch.script_request import Resources

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
GENERATED = re.compile(r"^(<!-- generated: (.+?) -->\n).*?^(?=<!-- end -->$)", re.MULTILINE | re.DOTALL)
LONGEST = 100  # the characters of a signature that stands on one line
# A signature has the types, and a tuple that is returned has no names.
DOCSTRINGS: dict[str, Any] = {
    "warn_missing_types": False,
    "warn_unknown_params": False,
    "returns_named_value": False,
    "returns_multiple_items": False,
}


def main() -> int:
    is_check = sys.argv[1:] == ["--check"]
    package = griffe.load(
        "dualdist", search_paths=[ROOT], resolve_aliases=True, resolve_external=False, allow_inspection=False
    )
    stale = []
    for path in sorted(PAGES.rglob("*.md")):
        page = path.read_text()
        made = GENERATED.sub(lambda match: f"{match[1]}\n{generate(match, package)}\n\n", page)
        if made != page:
            stale.append(str(path.relative_to(ROOT)))
            if not is_check:
                path.write_text(made)
    if stale and is_check:
        print(f"{', '.join(stale)}: not what the code says now: make reference", file=sys.stderr)
        return 1
    return 0


def generate(match: re.Match[str], package: Any) -> str:
    """Return a generated part."""
    return re.sub("\n{3,}", "\n\n", "\n".join(parts(match, package))).strip()


def parts(match: re.Match[str], package: Any) -> Iterator[str]:
    """Yield the paragraphs of a generated part; its headings are one level below the last one before it."""
    level = len(re.findall(r"^#+(?= )", match.string[: match.start()], re.MULTILINE)[-1]) + 1
    if match[2] == "command line":
        yield from command_line()
    elif match[2] == "job file":
        yield from job_file()
    elif match[2] == "errors":
        for each in package["errors"].classes.values():
            yield from described(each, level, f"`dd.{each.name}`")
            yield f"Bases: {', '.join(f'`{base}`' for base in each.bases)}.\n"
    else:
        for name, listed in re.findall(r"([\w.]+)(?:\(([\w, *]+)\))?", match[2]):
            thing = package[name]
            is_public = "." not in name or name.startswith("elastic.")
            title = f"dd.{name}" if is_public else f"dualdist.{name}"
            yield from described(thing, level, f"`{title}`")
            methods = (
                [each for each, function in thing.functions.items() if function.docstring] if listed == "*" else []
            )
            for member in methods or filter(None, listed.split(", ")):
                yield from described(thing[member], level + 1, f"`{thing.name}.{member}`")


def described(thing: Any, level: int, title: str) -> Iterator[str]:
    """Yield a heading, the signature, and the docstring's sections."""
    yield f"{'#' * level} {title}\n"
    if has_signature(thing):
        yield f"```py\n{signature(thing)}\n```\n"  # not "python", the language of programs that a test runs
    if thing.docstring is None:
        return
    # griffe shows an example as code under this title only.
    thing.docstring.value = re.sub(r"^Example:$", "Examples:", thing.docstring.value, flags=re.MULTILINE)
    for section in thing.docstring.parse("google", **DOCSTRINGS):
        yield from shown(section)


def has_signature(thing: Any) -> bool:
    """Return False for properties, errors, and classes without parameters, which a program never calls."""
    if thing.is_class and (thing.name.endswith("Error") or not [*parameters(thing)]):
        return False
    return "property" not in thing.labels


def shown(section: Any) -> Iterator[str]:
    kind = section.kind.value
    if kind == "text":
        yield f"{escaped(section.value).replace('::', ':')}\n"  # "Example::" before a block of code
    elif kind == "examples":
        yield from (f"```pycon\n{text}\n```\n" for _, text in section.value)
    elif kind == "admonition":
        yield f"**{section.title}**\n\n{escaped(section.value.description)}\n"
    elif kind in ("parameters", "attributes", "raises", "returns", "yields"):
        yield f"**{kind.capitalize()}**\n"
        for each in section.value:
            name = getattr(each, "name", "") or (each.annotation if kind == "raises" else "")
            text = escaped(" ".join(each.description.split()))
            yield f"- `{name}`: {text}" if name else text
        yield ""
    else:
        raise ValueError(f"a docstring's section {kind!r}, which docs/reference.py does not know: {section.as_dict()}")


def escaped(text: str) -> str:
    """Return text in which Markdown finds emphasis, tags and cells in code spans only."""
    words = re.split(r"(``.*?``|`[^`]*`)", text)
    words[::2] = (re.sub(r"[*|]", r"\\\g<0>", word).replace("<", "&lt;") for word in words[::2])
    return "".join(words)


def signature(thing: Any) -> str:
    """Return a name with its parameters, on one line or with a line each."""
    if thing.is_attribute:
        return f"{thing.name} = {thing.value}"
    words = [word for word in parameters(thing) if word.partition(":")[0] not in ("self", "cls")]
    returns = f" -> {thing.returns}" if thing.is_function and thing.returns else ""
    line = f"{thing.name}({', '.join(words)}){returns}"
    if len(line) <= LONGEST:
        return line
    return "\n".join([f"{thing.name}(", *(f"    {word}," for word in words), f"){returns}"])


def parameters(thing: Any) -> Iterator[str]:
    """Yield the parameters as they are written in Python, with `/` and `*`."""
    before = None
    for each in thing.parameters:
        kind = each.kind.value
        if before == "positional-only" != kind:
            yield "/"
        if kind == "keyword-only" and before not in (kind, "variadic positional"):
            yield "*"
        before = kind
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        annotation = f": {each.annotation}" if each.annotation else ""
        default = "" if stars or each.default is None else f" = {each.default}" if annotation else f"={each.default}"
        yield f"{stars}{each.name}{annotation}{default}"


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
        given = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
        if not given:
            continue
        title = (group.title or "").capitalize()
        yield f"**{title}**{': ' + group.description if group.description else ''}\n\n| | |\n|---|---|"
        for action in given:
            text = parser._get_formatter()._expand_help(action) if action.help else ""
            yield f"| {', '.join(f'`{word}`' for word in invocations(action))} | {escaped(text)} |".replace("  |", " |")
        yield ""
    if parser.epilog:
        yield f"{parser.epilog}\n"


def invocations(action: argparse.Action) -> list[str]:
    """Return the forms of an option, each with its value."""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    metavar = action.metavar if isinstance(action.metavar, str) else choices or action.dest.upper()
    if not action.option_strings:
        return [metavar]
    return [option if action.nargs == 0 else f"{option} {metavar}" for option in action.option_strings]


def job_file() -> Iterator[str]:
    """Yield a table of the keys of a job file, and one of those under `resources`, from the options of `run`."""
    for title, described in (("Keys", RunRequest), ("Keys under `resources`", Resources)):
        yield f"\n## {title}\n\n| key | option | meaning |\n|---|---|---|"
        for key, spec in options_of(described).items():
            keys = " or ".join(f"`{each}`" for each in (key, spec.alias) if each)
            yield f"| {keys} | {', '.join(f'`{each}`' for each in spec.flags_of(key))} | {escaped(spec.help)} |"
        if described is RunRequest:
            yield "| `resources` | | what a scheduler needs, see below |"


if __name__ == "__main__":
    sys.exit(main())

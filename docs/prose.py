"""Check the prose of the manual, the READMEs and the help texts; exit with 1 where a line needs another wording.

    python docs/prose.py

It finds sentences of more than 35 words, the phrases listed here, and what proselint finds in English of any kind. The
reference in docs/pages/reference has the docstrings and the help of `dualdist`; the examples' help is read here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import proselint.checks
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]
LONGEST = 35  # words of a sentence
# What to write instead of each.
PHRASES = {
    r"another one": "the noun, as in `another rank`",
    r"of (?:which|whom|whose)": "`whose`, or two sentences",
    r"but for": "`except`",
    r"(?:goes?|works?|stands?) (?:on )?beside": "`alongside`",
    r"queued? (?:it |them )?again": "`requeued`",
    r"scripts? (?:for|of) one process": "`single-process script`",
    r"(?:below 1|less) is faster": "`lower is faster`",
    r"anew": "`again`",
    r"on as many ranks": "`on the same number of ranks`",
    r"held against": "`checked against`",
    r"of (?:ours|yours|theirs|dualdist's)": "`your own`",
    r"(?:^|(?<=[.!?] ))of (?!course)": "the part before its whole: a sentence does not begin with `Of`",
    r"(?:after|with|take) so (?:few|many)": "a number, as in `after N seconds`",
    r"whether or not": "`whether`",
    r"in order to": "`to`",
    r"utili[sz]e": "`use`",
}
# About typesetting, and about words repeated between blocks of code.
OTHERS = ("typography", "lexical_illusions", "spelling")
CODE = re.compile(r"`[^`\n]*`")
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2$", re.MULTILINE | re.DOTALL)


def main() -> int:
    CheckRegistry().register_many(proselint.checks.__register__)
    texts = [(path, path.read_text()) for path in pages()] + [
        (path, text) for path in sorted((ROOT / "examples").rglob("*.py")) for text in helps(path)
    ]
    found = [f"{path.relative_to(ROOT)}:{what}" for path, text in texts for what in problems(text)]
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


def pages() -> list[Path]:
    """Return the manual and what stands beside it in the repository."""
    return [*sorted(ROOT.glob("[A-Z]*.md")), *sorted(ROOT.glob("[a-z]*/README.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def helps(path: Path) -> Iterator[str]:
    """Yield a program's docstring, which begins its --help, and the help of its options."""
    tree = ast.parse(path.read_text())
    yield ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        for name, value in named_values(node):
            if name == "help" and isinstance(value, ast.Constant):
                yield str(value.value)


def named_values(node: ast.AST) -> Iterator[tuple[object, ast.AST]]:
    """Yield the keyword arguments of a call, or the pairs of a dict."""
    if isinstance(node, ast.Call):
        yield from ((keyword.arg, keyword.value) for keyword in node.keywords)
    elif isinstance(node, ast.Dict):
        keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
        yield from zip(keys, node.values, strict=True)


def problems(text: str) -> Iterator[str]:
    """Yield the line and what is wrong there."""
    prose = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for line, block in blocks(prose):
        for sentence in sentences(block):
            if (words := len(sentence.split())) > LONGEST:
                yield f"{line}: {words} words, at most {LONGEST}: {sentence[:60]} ..."
            for phrase, better in PHRASES.items():
                if match := re.search(rf"(?<!\w){phrase}\b", CODE.sub("code", sentence), re.IGNORECASE):
                    yield f"{line}: {match[0]!r}: write {better}: {sentence[:100]} ..."
    checks = {name: name not in OTHERS and is_on for name, is_on in DEFAULT["checks"].items()}
    for result in LintFile("page", CODE.sub("code", prose)).lint({**DEFAULT, "checks": checks}) if prose else []:
        yield f"{result.pos[0] - 1}: {result.check_result.message} ({result.check_result.check_path})"


def blocks(prose: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, list items, headings and cells of tables, each with its first line's number."""
    block: list[str] = []
    first = 0
    for number, line in enumerate([*prose.splitlines(), ""], 1):
        text = line.strip()
        starts_block = re.match(r"[-*] |[|#<>]|\d+\. ", text)
        if block and (starts_block or not text):
            yield first, " ".join(block)
            block = []
        if text.startswith("|"):
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", text)[1:-1])
        elif text and not text.startswith("<!--"):
            first = first if block else number
            block.append(re.sub(r"^(?:[-*>]|#+|\d+\.) +", "", text))


def sentences(block: str) -> list[str]:
    """Return the sentences, without what a link leads to; a point inside code ends none."""
    text = re.sub(r"\]\([^)]*\)", "]", block)
    text = re.sub(r"`[^`]*`", lambda match: re.sub(r"[.!?] ", " ", match[0]), text)
    return re.split(r"(?<=[.!?])[)\"'*_]*\s+(?=[^a-z])", text)


if __name__ == "__main__":
    sys.exit(main())

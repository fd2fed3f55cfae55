"""The pages of the manual: their blocks of code, and the lines that a person types."""

import re
from dataclasses import dataclass
from pathlib import Path

from harness.base_env import ROOT

PAGES = ROOT / "docs" / "pages"
FILES = sorted(PAGES.rglob("*.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")
# Pages whose programs have names, by which their lines run them: each has a file of tests/launch that runs all of it.
RUN_BY_THEIR_OWN_TEST = {"tutorial.md": "test_tutorial.py", "guides/centre-scripts.md": "test_centre_scripts.py"}


@dataclass(frozen=True)
class Block:
    """A fenced block: the page's path in docs/pages, and the line on which the block begins."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def find_blocks(language: str) -> list[Block]:
    """Return the blocks of all pages in a language."""
    return [
        Block(str(path.relative_to(PAGES)), text.count("\n", 0, match.start()) + 2, match[1], match[2])
        for path in FILES
        for text in [path.read_text()]
        for match in FENCED.finditer(text)
        if match[1] == language
    ]


def find_commands(page: str | None = None) -> dict[str, Block]:
    """Return each different command line of a page, by default of all pages that have no test of their own.

    With the first block that has it; one in the background with the next one.
    """
    found: dict[str, Block] = {}
    for block in find_blocks("bash"):
        if block.page != page and (page is not None or block.page in RUN_BY_THEIR_OWN_TEST):
            continue
        for line in re.sub(r"&\n(?=.)", "& ", block.text).splitlines():
            found.setdefault(line, block)
    return found


def named_programs(page: str) -> dict[str, str]:
    """Return the page's programs by the names that stand in their first lines."""
    blocks = (block for block in find_blocks("python") if block.page == page)
    return {match[1]: block.text for block in blocks if (match := NAMED.match(block.text))}


def without_code(path: Path) -> str:
    """Return a page's text without code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", path.read_text()))

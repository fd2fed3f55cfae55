"""Break the package on purpose, in small ways drawn at random, and count which of them `make test` finds.

    python tests/mutants.py [--count 80] [--seed 1] [--full]

Each mutant is first tested alone by the unit tests that name its module and, where ranks run its code, by all laws in
the reference cell. The survivors are tested together by all tests of `make test`, and halved until it is known which of
them were found; with `--full`, those of `make test-all` are run on the rest.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The code that is changed, in equal parts, and whether ranks run it.
AREAS: dict[str, tuple[Sequence[str], bool]] = {
    "gradients": (["ddp"], True),
    "collectives": (["collectives", "operations", "backends"], True),
    "rendezvous": (["rendezvous", "session.py"], True),
    "environments": (["environments"], False),
    "checkpoints": (["checkpoint", "data"], True),
    "launchers": (["launch"], False),
}
REFERENCE = ["tests/contract", "-k", "spawn-default-shm-2"]
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
LIMIT_S = 1500.0


@dataclass(frozen=True)
class Mutant:
    """One small change of one file: the text from start to end, in characters, becomes another."""

    area: str
    path: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        def short(text: str) -> str:
            return re.sub(r"\s+", " ", text)[:60]

        return f"{self.path}:{self.line} {self.kind}: {short(self.old)} -> {short(self.new)}"


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each mutated copy of one node, with the kind of the mutation."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            changed.ops = [COMPARISONS[type(operator)]()]
            yield "comparison", changed
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC and not is_text(changed):
            changed.op = ARITHMETIC[type(operator)]()
            yield "arithmetic", changed
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            changed.value = value + 1
            yield "off by one", changed
        case ast.Expr(value=ast.Call()):
            yield "dropped call", ast.Pass()
        case ast.Call(func=ast.Name(id="max" | "min" | "cast")):  # in whose arguments an order means nothing
            return
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(arg, ast.Starred) for arg in changed.args):
            changed.args = [second, first, *rest]
            yield "swapped arguments", changed
        case ast.If(body=[ast.Raise() | ast.Return() | ast.Continue()], orelse=[]):
            yield "removed guard", ast.Pass()


def is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (node.left, node.right))


def mutants_of(path: Path, area: str) -> Iterator[Mutant]:
    """Yield all mutants of a file's functions, except in annotations and in the texts of errors."""
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    for node in inside_functions(ast.parse(text)):
        for kind, changed in variants(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            old, new = raw[start:end].decode(), ast.unparse(changed)
            if not isinstance(node, ast.stmt):
                new = f"({new})" if not isinstance(node, ast.Constant | ast.Call) else new
            yield Mutant(area, str(path.relative_to(ROOT)), node.lineno, kind, start, end, old, new)


def inside_functions(tree: ast.AST, is_inside: bool = False) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise):
                continue
            if is_inside and hasattr(child, "lineno"):
                yield child
            yield from inside_functions(child, is_inside or (isinstance(tree, ast.FunctionDef) and field == "body"))


def draw(count: int, seed: int) -> list[Mutant]:
    """Return mutants drawn at random, equally many from each area; no two overlap."""
    chance = random.Random(seed)
    drawn: list[Mutant] = []
    for number, (area, (places, _)) in enumerate(AREAS.items(), start=1):
        found = [ROOT / "dualdist" / place for place in places]
        files = [file for place in found for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
        every = [mutant for file in files for mutant in mutants_of(file, area)]
        for mutant in chance.sample(every, len(every)):
            if len(drawn) == count * number // len(AREAS):
                break
            if all(m.path != mutant.path or m.end <= mutant.start or mutant.end <= m.start for m in drawn):
                drawn.append(mutant)
    return drawn


def first_tests(mutant: Mutant) -> list[list[str]]:
    """Return arguments of pytest for the tests that are most likely to find the mutant."""
    module = Path(mutant.path)
    name = module.parent.name if module.stem == "__init__" else module.stem
    word = re.compile(rf"\b{name}\b")
    files = [path for path in sorted((ROOT / "tests/unit").glob("test_*.py")) if word.search(path.read_text())]
    unit = [[str(file.relative_to(ROOT)) for file in files]] if files else []
    return [*unit, *([REFERENCE] if AREAS[mutant.area][1] else [])]


class Tree:
    """A copy of the repository, in which mutants are put and tests are run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, self._folder, ignore=ignored)

    def passes(self, mutants: Sequence[Mutant], commands: Sequence[Sequence[str]]) -> bool:
        """Return True if all the pytest commands pass with all the mutants."""
        for path in {mutant.path for mutant in mutants}:
            raw = (ROOT / path).read_bytes()
            for mutant in sorted((m for m in mutants if m.path == path), key=lambda m: -m.start):
                raw = raw[: mutant.start] + mutant.new.encode() + raw[mutant.end :]
            (self._folder / path).write_bytes(raw)
        try:
            return all(self._run(command) for command in commands)
        finally:
            for mutant in mutants:
                shutil.copyfile(ROOT / mutant.path, self._folder / mutant.path)

    def _run(self, command: Sequence[str]) -> bool:
        argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *command]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(argv, cwd=self._folder, env=env, capture_output=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode in (0, 5)  # 5: nothing was collected

    def survivors(self, mutants: Sequence[Mutant], command: Sequence[str]) -> list[Mutant]:
        """Return the mutants with which the tests pass: all at once, else each half on its own."""
        if not mutants or self.passes(mutants, [command]):
            return list(mutants)
        if len(mutants) == 1:
            return []
        middle = len(mutants) // 2
        return [*self.survivors(mutants[:middle], command), *self.survivors(mutants[middle:], command)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="test survivors by `make test-all`, too")
    options = parser.parse_args()
    drawn = draw(options.count, options.seed)
    living = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(Path(folder))
        for mutant in drawn:
            if tree.passes([mutant], first_tests(mutant)):
                living.append(mutant)
            print("lives" if mutant in living else "found", mutant, flush=True)
        for tier in ("not full", "full")[: 1 + options.full]:
            living = tree.survivors(living, ["-m", tier, "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"])
    print("\n| area | mutants | found | live |\n|---|---|---|---|")
    for area in AREAS:
        count, live = (sum(mutant.area == area for mutant in mutants) for mutants in (drawn, living))
        print(f"| {area} | {count} | {count - live} | {live} |")
    print(*(f"lives: {mutant}" for mutant in living), sep="\n")


if __name__ == "__main__":
    main()

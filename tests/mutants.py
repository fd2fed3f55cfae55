"""Break the package on purpose, in small ways drawn at random, and count which of them `make test` finds.

    python tests/mutants.py [--count 80] [--seed 1] [--json FILE]

Each mutant first meets alone the unit tests that name its module and, where ranks run its code, all laws in the
reference cell. Those that survive are put into one tree, against all tests of `make test`; where that fails, they are
halved until it is known which of them were found. `--full` holds the rest against `make test-all`, too.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
# What is broken, in equal parts, and whether ranks run it.
AREAS: dict[str, tuple[Sequence[str], bool]] = {
    "gradients": (["ddp"], True),
    "collectives": (["collectives", "operations.py", "backends"], True),
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
WORKERS = 2


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
    """Yield all mutants of a file: what its functions do, and not its annotations or the texts of its errors."""
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
    """Return mutants drawn at random, equally many from each area."""
    chance = random.Random(seed)
    drawn: list[Mutant] = []
    for number, (area, (places, _)) in enumerate(AREAS.items()):
        found = [ROOT / "dualdist" / place for place in places]
        files = [file for place in found for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
        every = [mutant for file in files for mutant in mutants_of(file, area)]
        drawn += chance.sample(every, count * (number + 1) // len(AREAS) - count * number // len(AREAS))
    return drawn


def first_tests(mutant: Mutant) -> list[list[str]]:
    """Return the arguments of pytest for what is most likely to find the mutant."""
    module = Path(mutant.path)
    name = module.parent.name if module.stem == "__init__" else module.stem
    word = re.compile(rf"\b{name}\b")
    files = [path for path in sorted((ROOT / "tests/unit").glob("test_*.py")) if word.search(path.read_text())]
    unit = [[str(file.relative_to(ROOT)) for file in files]] if files else []
    return [*unit, *([REFERENCE] if AREAS[mutant.area][1] else [])]


class Trees:
    """Copies of the repository, in which mutants are put and tests are run."""

    def __init__(self, folder: Path) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(WORKERS):
            tree = folder / f"tree-{number}"
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
            self._free.put(tree)

    def passes(self, mutants: Sequence[Mutant], commands: Sequence[Sequence[str]]) -> bool:
        """Return True if all the pytest commands pass with all the mutants in one tree."""
        tree = self._free.get()
        try:
            for path in {mutant.path for mutant in mutants}:
                raw = (ROOT / path).read_bytes()
                for mutant in sorted((m for m in mutants if m.path == path), key=lambda m: -m.start):
                    raw = raw[: mutant.start] + mutant.new.encode() + raw[mutant.end :]
                (tree / path).write_bytes(raw)
            return all(self._run(tree, command) for command in commands)
        finally:
            for mutant in mutants:
                shutil.copyfile(ROOT / mutant.path, tree / mutant.path)
            self._free.put(tree)

    def _run(self, tree: Path, command: Sequence[str]) -> bool:
        argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *command]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(argv, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode in (0, 5)  # 5: nothing was collected


def survivors(trees: Trees, mutants: Sequence[Mutant], command: Sequence[str]) -> list[Mutant]:
    """Return the mutants with which the tests pass: all at once, else each half by itself."""
    if not mutants or trees.passes(mutants, [command]):
        return list(mutants)
    if len(mutants) == 1:
        return []
    middle = len(mutants) // 2
    return [*survivors(trees, mutants[:middle], command), *survivors(trees, mutants[middle:], command)]


def without_overlap(mutants: Sequence[Mutant]) -> list[list[Mutant]]:
    """Return the mutants in groups that can be put into one tree."""
    groups: list[list[Mutant]] = []
    for mutant in mutants:
        for group in groups:
            if all(m.path != mutant.path or m.end <= mutant.start or mutant.end <= m.start for m in group):
                group.append(mutant)
                break
        else:
            groups.append([mutant])
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="hold survivors against make test-all, too")
    parser.add_argument("--first-only", action="store_true", help="stop after the tests that each mutant meets alone")
    parser.add_argument("--json", type=Path, help="where the mutants and what became of them are written")
    options = parser.parse_args()
    drawn = draw(options.count, options.seed)
    fate: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(WORKERS) as pool:
        trees = Trees(Path(folder))

        def meet_first_tests(mutant: Mutant) -> tuple[Mutant, bool, float]:
            began = time.monotonic()
            return mutant, trees.passes([mutant], first_tests(mutant)), time.monotonic() - began

        for mutant, lives, seconds in pool.map(meet_first_tests, drawn):
            fate[mutant] = "lives" if lives else "first tests"
            print(f"{fate[mutant]:12} {seconds:6.0f} s  {mutant}", flush=True)
        for name, tier in (("make test", "not full"), ("make test-all", "full"))[: 1 + options.full]:
            if options.first_only:
                break
            living = [mutant for mutant, how in fate.items() if how == "lives"]
            command = ["-m", tier, "-n", str(WORKERS), "--dist", "loadgroup", "--no-loadscope-reorder"]
            for group in without_overlap(living):
                kept = survivors(trees, group, command)
                fate |= {mutant: name for mutant in group if mutant not in kept}
    if options.json:
        options.json.write_text(json.dumps([{**asdict(m), "found by": fate[m]} for m in fate], indent=1))
    print("\n| area | mutants | found | live |\n|---|---|---|---|")
    for area in AREAS:
        counts = Counter(how for mutant, how in fate.items() if mutant.area == area)
        print(f"| {area} | {counts.total()} | {counts.total() - counts['lives']} | {counts['lives']} |")
    print(*(f"lives: {mutant}" for mutant, how in fate.items() if how == "lives"), sep="\n")


if __name__ == "__main__":
    main()

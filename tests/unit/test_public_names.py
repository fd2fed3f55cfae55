"""Editors and type checkers know every public name: mypy, jedi and dir() are asked; and the README's are there."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import jedi
from harness.base_env import ROOT

import dualdist as dd
from dualdist import errors

PUBLIC = {name for name in dd.__all__ if name != "__version__"}
CALLED_RIGHT = """
import torch
import dualdist as dd

dd.init()
mean: torch.Tensor = dd.allreduce(torch.ones(2))
work = dd.allreduce(torch.ones(2), async_op=True)
mean = work.wait()
optimizer: torch.optim.SGD = dd.wrap_optimizer(torch.optim.SGD([mean]))
sampler = dd.Sampler(range(10), remainder="drop")
numbers: list[int] = dd.allgather_object(1)
try:
    dd.barrier()
except dd.MismatchError:
    dd.shutdown()
"""
CALLED_WRONG = {
    "dd.allreduce(1)": "call-overload",
    "dd.allreduce(torch.ones(2), op='avg')": "call-overload",
    "dd.alreduce(torch.ones(2))": "attr-defined",
    "dd.Sampler(range(10))": "call-arg",
    "dd.broadcast_parameters(1)": "arg-type",
    "dd.wrap_optimizer('sgd')": "type-var",
}


def test_every_public_name_is_there_and_no_other_is_listed() -> None:
    assert dir(dd) == sorted(dd.__all__)
    assert {name for name in PUBLIC if not hasattr(dd, name)} == set()
    exceptions = {name for name, each in inspect.getmembers(errors, inspect.isclass)}
    assert exceptions <= PUBLIC


def test_jedi_completes_every_public_name_with_its_parameters() -> None:
    """jedi reads the files, as editors and IPython do; it does not import them."""

    def script(line: str) -> jedi.Script:
        return jedi.Script(f"import dualdist as dd\n{line}", environment=jedi.InterpreterEnvironment())

    assert PUBLIC - {each.name for each in script("dd.").complete()} == set()
    callables = PUBLIC - {"elastic"}
    assert {name for name in callables if not script(f"dd.{name}(").get_signatures()} == set()


def test_mypy_accepts_right_calls_and_rejects_wrong_ones(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(CALLED_RIGHT)
    head = ["import torch", "import dualdist as dd"]
    wrong.write_text("\n".join([*head, *CALLED_WRONG]) + "\n")
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--hide-error-context", right, wrong],
        env={**os.environ, "MYPYPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    expected = [(f"wrong.py:{number}:", f"[{code}]") for number, code in enumerate(CALLED_WRONG.values(), 3)]
    assert [(line.split(" ")[0], line.split()[-1]) for line in found] == expected, done.stdout + done.stderr

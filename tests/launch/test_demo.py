"""The demo and the training script as a person starts them."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness.jobs import Launch
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = (sys.executable, str(EXAMPLES / "demo.py"))
TRAIN = str(EXAMPLES / "train.py")
SHORT = ("--model=mlp", "--epochs=2", "--max-steps=60")


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def summary_of(launch: Launch, argv: tuple[str, ...], name: str = "summary.json") -> dict[str, Any]:
    outcome = launch((*argv, f"--summary={name}"), timeout_s=180)
    summary: dict[str, Any] = json.loads((launch.directory / name).read_text())
    assert f"hash={summary['parameter_hash'][:16]}" in outcome.stdout
    return summary


def test_every_launcher_and_backend_ends_with_the_same_bits(launch: Launch) -> None:
    outcome = launch((*DEMO, "--model", "mlp"), timeout_s=400)
    assert "THE SAME PARAMETERS TO THE LAST BIT: 7 runs, 2 ranks, 50 steps" in outcome.stdout


def test_failed_run_is_shown_with_its_reason(launch: Launch) -> None:
    outcome = launch((*DEMO, "--model", "resnet19", "--only", "torchrun/native"), timeout_s=180, check=False)
    assert outcome.rc == 1
    assert "FAILED: train.py: error: --model resnet19: unknown" in outcome.stdout
    assert "1 OF 1 RUNS FAILED: torchrun/native" in outcome.stdout


def test_run_that_takes_too_long_fails_and_leaves_nothing(launch: Launch) -> None:
    outcome = launch((*DEMO, "--timeout", "1", "--only", "torchrun/native"), timeout_s=180, check=False)
    assert outcome.rc == 1
    assert "torchrun/native was not done after 1 s and was ended" in outcome.stdout


@pytest.mark.parametrize(("hashes", "ranks", "code"), [("aa", 2, 0), ("ab", 2, 1), ("ab", 4, 0)])
def test_one_differing_hash_of_two_ranks_fails_the_demo(demo: ModuleType, hashes: str, ranks: int, code: int) -> None:
    launchers = ("torchrun", "mpirun")
    results = {
        demo.Run(launcher, "native"): {"parameter_hash": letter * 64, "ranks": ranks}
        for launcher, letter in zip(launchers, hashes, strict=True)
    }
    results[demo.Run("python", "auto")] = {"parameter_hash": "c" * 64, "ranks": 1}
    text = io.StringIO()
    options = argparse.Namespace(ranks=ranks, steps=50)
    assert demo.verdict(results, options, 0.0, Console(file=text, width=140)) == code
    assert ("THE PARAMETERS DIFFER with" in text.getvalue()) == (hashes == "ab")


def test_two_ranks_train_as_one_process_does_on_the_whole_batch(launch: Launch) -> None:
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2", TRAIN, *SHORT, "--batch-size=16", "--clip=1")
    two = summary_of(launch, torchrun, "two.json")
    one = summary_of(launch, (sys.executable, TRAIN, *SHORT, "--batch-size=32", "--clip=1"), "one.json")
    assert (two["ranks"], one["ranks"], two["steps"], one["steps"]) == (2, 1, 60, 60)
    # Sums of 32 floats in another order, over 60 steps: the loss agrees to about 1e-6.
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    # 360 images, of which one may lie on the border.
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=1.5 / 360)
    assert one["accuracy"] > 0.8


def test_main_runs_under_spawn(launch: Launch) -> None:
    program = launch.directory / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import dualdist as dd, train\n"
        "if __name__ == '__main__':\n"
        "    summaries = dd.spawn(train.main, 2, (['--model=mlp', '--max-steps=3', '--dataset=fake'],))\n"
        "    print([(each['launcher'], each['ranks'], each['backend']) for each in summaries])\n"
    )
    outcome = launch((sys.executable, str(program)), timeout_s=180)
    assert "[('spawn', 2, 'native'), ('spawn', 2, 'native')]" in outcome.stdout


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--batch-size=0", "error: argument --batch-size: 0 is not 1 or more"),
        ("--batch-size=2000", "error: 1437 images do not fill a batch of 2000 on each of 2 ranks"),
    ],
)
def test_wrong_value_ends_every_rank_with_a_line(launch: Launch, flag: str, words: str) -> None:
    argv = ("torchrun", "--standalone", "--nproc-per-node=2", TRAIN, "--model=mlp", flag)
    outcome = launch(argv, timeout_s=180, check=False)
    assert outcome.rc != 0
    assert words in outcome.stderr

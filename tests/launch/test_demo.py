"""The demo and the training script as a person starts them."""

import argparse
import importlib
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from harness.effort import Effort
from harness.jobs import Launch
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = (sys.executable, str(EXAMPLES / "demo.py"))


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


def test_every_launcher_and_both_backends_end_with_the_same_bits(launch: Launch, effort: Effort) -> None:
    """The long form makes all runs, as tests/docker does in the image."""
    some = ("--only=python", "--only=torchrun/native", "--only=horovodrun/horovod", "--only=mpirun")
    outcome = launch((*DEMO, "--model=mlp", *effort(some, ())), timeout_s=400)
    runs = effort(4, 7)
    assert f"THE SAME PARAMETERS TO THE LAST BIT: {runs} runs, 2 ranks, 50 steps" in outcome.stdout


def test_failed_run_is_shown_with_its_reason(launch: Launch) -> None:
    outcome = launch((*DEMO, "--model", "resnet19", "--only", "python"), timeout_s=180, check=False)
    assert outcome.rc == 1
    assert "FAILED: train.py: error: --model resnet19: unknown" in outcome.stdout
    assert "1 OF 1 RUNS FAILED: python/auto" in outcome.stdout


@pytest.mark.smoke
def test_run_that_takes_too_long_fails_and_leaves_nothing(launch: Launch) -> None:
    outcome = launch((*DEMO, "--timeout", "1", "--only", "torchrun/native"), timeout_s=180, check=False)
    assert outcome.rc == 1
    assert "torchrun/native was not done after 1 s and was ended" in outcome.stdout


@pytest.mark.smoke
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


PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import dualdist as dd, train
from common.data import once_a_node

def fetch():
    time.sleep(0.3)  # while which the other rank must not read
    Path(f"fetched-by-{dd.rank()}").touch()

def work():
    dd.init()
    once_a_node(fetch, "fetch")
    files = [path.name for path in Path().glob("fetched-by-*")]
    dd.shutdown()
    summary = train.main(["--model=mlp", "--max-steps=3", "--dataset=fake"])
    return files, summary["launcher"], summary["ranks"], summary["backend"]

if __name__ == "__main__":
    print(dd.spawn(work, 2))
"""


def test_main_runs_under_spawn_and_one_rank_fetches_data_for_its_node(launch: Launch) -> None:
    program = launch.write("program.py", PROGRAM)
    outcome = launch((sys.executable, program, str(EXAMPLES)))
    each = (["fetched-by-0"], "spawn", 2, "native")
    assert str([each, each]) in outcome.stdout

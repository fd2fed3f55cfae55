"""The examples, started as their README says, on settings that take seconds."""

import difflib
import json
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import leaks
from harness.base_env import ROOT
from harness.jobs import Launch
from harness.rank_pool import RankPool
from launch import example_rank
from launch.running import blocks
from launch.test_demo import DEMO

EXAMPLES = ROOT / "examples"
README = EXAMPLES / "README.md"
HOROVOD = {"DUALDIST_BACKEND": "horovod"}
# Of the README's table: the program, the command, and what it prints, where the columns have that.
ROW = r"^\| \[([\w.]+)\]\(\1\) \|[^|]*\| (?:`([^`|]+)`|[^`|]+) \| (?:`([^`|]+)`|[^`|]+) \|$"
ROWS = re.findall(ROW, README.read_text(), re.MULTILINE)
# A number with decimals.
DECIMAL = r"(\d+\.\d+)"


def command_lines() -> dict[str, list[str]]:
    """Return the README's command lines, of its table and its blocks, by the program that they start."""
    found: dict[str, list[str]] = {}
    for line in [*(command for _, command, _ in ROWS if command), *"".join(blocks(README)).splitlines()]:
        found.setdefault(re.findall(r"examples/([\w.]+)", line)[0], []).append(line)
    return found


COMMANDS = command_lines()


def commands(program: str) -> list[list[str]]:
    """Return the README's command lines of a program, which run in another folder."""
    return [
        [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(line)]
        for line in COMMANDS.pop(program)
    ]


(TRY,) = commands("demo.py")
(ALONE,) = commands("single_process.py")
(TRAIN,) = commands("train.py")
(SPAWN,) = commands("spawn.py")
(DATA_PARALLEL,) = commands("data_parallel.py")
(MODEL_PARALLEL,) = commands("model_parallel.py")
(CIFAR10,) = commands("cifar10.py")
(IMAGENET,) = commands("imagenet.py")
(GPT,) = commands("mingpt.py")
(KILLED,) = commands("fault_tolerance.py")
SCRIPT, SCRIPT_ON_HOROVOD, SCRIPT_ALONE = commands("horovod_script.py")
MEETINGS = commands("rendezvous.py")
(NOTEBOOK,) = commands("notebook.ipynb")


def check_line(program: str, text: str) -> None:
    """Check that a line of the text is the README's, except for numbers."""
    (line,) = (words for name, _, words in ROWS if name == program)
    parts = re.split(r"[0-9a-f]{16}|\d[\d.]*", line)
    assert len(parts) > 1, f"{program}: the README shows no line with a number"
    pattern = r"([0-9a-f]{16}|\d[\d.]*)".join(map(re.escape, parts))
    assert re.search(f"^{pattern}$", text, re.MULTILINE), f"{line!r} is not like a line of\n{text}"


def numbers(pattern: str, text: str) -> list[float]:
    """Return the group of each match of the pattern; there must be one."""
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in\n{text}"
    return found


def falls(values: Sequence[float]) -> bool:
    return len(values) > 1 and values[-1] < values[0]


@pytest.mark.smoke
def test_every_example_stands_in_the_readme_and_every_command_is_run_here() -> None:
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert {program for program, *_ in ROWS} == BRIEFLY.keys() | OTHERWISE == programs
    assert list(COMMANDS) == ["collectives.py"]  # which test_the_example_runs starts
    assert [Path(word).name for word in TRY] == ["python", Path(DEMO[1]).name]  # which test_demo.py runs


@pytest.mark.smoke
def test_the_readme_shows_the_difference_between_one_process_and_many() -> None:
    alone, together = (
        (EXAMPLES / name).read_text().partition("from __future__")[2].splitlines(keepends=True)
        for name in ("single_process.py", "train.py")
    )
    lines = list(difflib.unified_diff(alone, together, "single_process.py", "train.py", n=1))
    shown = [line if not line.startswith("@@") else "@@\n" for line in lines]
    assert "".join(shown) == blocks(README, "diff")[0]


@pytest.mark.smoke
def test_help_fits_a_screen_and_has_an_example(launch: Launch) -> None:
    """All in one process, as most of each would be the import of torch."""
    programs = [path.name for path in sorted(EXAMPLES.glob("*.py")) if path.name != "horovod_script.py"]
    code = (
        "import contextlib, runpy, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "for name in sys.argv[1:]:\n"
        "    print('#', name)\n"
        f"    sys.argv = [{str(EXAMPLES)!r} + '/' + name, '--help']\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    outcome = launch([sys.executable, "-c", code, *programs], env={"COLUMNS": "120"})
    helps = dict(text.split("\n", 1) for text in outcome.stdout.split("# ") if text)
    assert list(helps) == programs
    for name, text in helps.items():
        assert f"examples/{name}" in text, text
        assert len(text.splitlines()) <= 50, text
        assert max(map(len, text.splitlines())) <= 120, text


# Each on a few samples: on two ranks of one job, as most of each start would be the import of torch.
BRIEFLY = {
    "single_process.py": "--model=mlp --epochs=1 --max-steps=4",
    "train.py": "--model=mlp --epochs=1 --max-steps=4",
    "collectives.py": "",
    "data_parallel.py": "--steps=1 --rounds=1 --batch-size=4",
    "model_parallel.py": "--epochs=1",
    "cifar10.py": "--epochs=1 --limit=16 --batch-size=4 --snapshots=kept --amp",
    "imagenet.py": "--epochs=1 --image-size=32 --limit=8 --batch-size=4 --workers=0 --checkpoints=run",
    "mingpt.py": "--steps=2 --write=5 --tensorboard runs --plot",
    "fault_tolerance.py": "--epochs=1",
    "rendezvous.py": "",
    "horovod_script.py": "--epochs=1",
}
OTHERWISE = {"demo.py", "spawn.py", "notebook.ipynb"}  # which start their ranks themselves


@pytest.fixture(scope="module")
def ranks(base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    launch = Launch(base_env, tmp_path_factory.mktemp("examples"))
    argv = ["torchrun", "--standalone", "--nproc-per-node=2", str(Path(example_rank.__file__)), str(EXAMPLES)]
    pool = RankPool(lambda env: launch.start(argv, env=env), 2, leaks.LONG_LIVED.add)
    yield pool
    pool.close()


@pytest.mark.smoke
@pytest.mark.parametrize("name", BRIEFLY)
def test_the_example_runs(ranks: RankPool, name: str) -> None:
    begin = "-m dualdist.hvd " if name == "horovod_script.py" else ""
    printed = ranks.run(f"{begin}{EXAMPLES / name} {BRIEFLY[name]}")
    if name == "collectives.py":
        assert printed[0] == blocks(README, "text")[0]
    else:
        check_line(name, printed[0])


def test_train_py_on_two_ranks_is_single_process_py_on_the_whole_batch(launch: Launch) -> None:
    short = ("--model=mlp", "--epochs=2", "--max-steps=60", "--clip=1")
    alone = launch([*ALONE, *short, "--batch-size=32", "--summary=one.json", "--plot=one.png"])
    together = launch([*TRAIN, *short, "--batch-size=16", "--summary=two.json"])
    check_line("single_process.py", alone.stdout)
    check_line("train.py", together.stdout)
    one, two = (json.loads((launch.directory / name).read_text()) for name in ("one.json", "two.json"))
    assert (one["ranks"], two["ranks"], one["steps"], two["steps"]) == (1, 2, 60, 60)
    # Sums of 32 floats in another order, over 60 steps: the loss agrees to about 1e-6.
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    # 360 images, of which one may lie on the border.
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=1.5 / 360)
    assert one["accuracy"] > 0.8
    assert (launch.directory / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.smoke("native")
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_spawned_ranks_train_together(launch: Launch, backend: str) -> None:
    text = launch([*SPAWN, "--epochs=1"], env={"DUALDIST_BACKEND": backend}).stdout
    check_line("spawn.py", text)
    first, second = re.findall(rf"^rank (\d): the loss went from {DECIMAL} to {DECIMAL}$", text, re.MULTILINE)
    assert (first[0], second[0]) == ("0", "1")
    assert first[1:] == second[1:]
    assert float(first[2]) < 0.5 * float(first[1])


def test_ranks_started_by_hand_meet(launch: Launch, free_ports: list[int]) -> None:
    """By tcp, file and env, all at once."""
    ports = dict(zip(("29400", "29401"), map(str, free_ports), strict=True))
    with ExitStack() as stack:
        jobs = []
        for words in MEETINGS:
            text = " ".join(words).removesuffix(" &").replace("file:///tmp", launch.directory.as_uri())
            words = re.sub("29400|29401", lambda found: ports[found[0]], text).split()
            variables = [word for word in words[: words.index("python")] if "=" in word]
            env = dict(variable.split("=") for variable in variables)
            jobs.append(stack.enter_context(launch.start(words[len(variables) :], env=env)))
        outcomes = [job.wait(100) for job in jobs]
    assert len(outcomes) == 6
    for number, outcome in enumerate(outcomes):
        way = ("tcp://", "file://", "env://")[number // 2]
        words = f"rank {number % 2} of 2 met the others by {way}.*: all ranks add up to 1\n"
        assert re.fullmatch(words, outcome.stdout), str(outcome)
    check_line("rendezvous.py", outcomes[-1].stdout)


@pytest.fixture
def free_ports() -> list[int]:
    """Return two unused ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return [each.getsockname()[1] for each in sockets]


def test_the_notebook_prints_its_saved_outputs(launch: Launch) -> None:
    """Its cells run in a Jupyter kernel; decimals may differ."""
    kept, again = Path(NOTEBOOK[-1]), launch.directory / "notebook.ipynb"
    shutil.copy(kept, again)
    paths = {"PYTHONPATH": f"{launch.env['PYTHONPATH']}:{EXAMPLES}", "IPYTHONDIR": str(launch.directory)}
    launch([*NOTEBOOK[:-1], str(again)], env=paths)
    shown, found = (printed(json.loads(path.read_text())) for path in (kept, again))
    assert re.sub(DECIMAL, "#", found) == re.sub(DECIMAL, "#", shown)
    assert "True" in found
    losses = numbers(DECIMAL, found)
    assert len(losses) == 8
    assert falls(losses[:4])
    assert losses[:4] == losses[4:]


def printed(notebook: dict[str, Any]) -> str:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text") or output["data"]["text/plain"]) + "\n" for output in outputs)


def test_data_parallel_trains_the_same_and_is_timed(launch: Launch) -> None:
    text = launch([*DATA_PARALLEL, "--steps=2", "--rounds=1", "--batch-size=8"]).stdout
    check_line("data_parallel.py", text)
    assert "16 images a step, on 2 CPU threads" in text
    there, here = numbers(rf"loss {DECIMAL}", text)
    assert here == pytest.approx(there, abs=2e-4)
    slow, fast = numbers(r"(\d+) images/s", text)
    (ratio,) = numbers(rf"dualdist is {DECIMAL} times as fast", text)
    # Both speeds are printed in whole numbers.
    assert (fast - 0.5) / (slow + 0.5) - 0.05 <= ratio <= (fast + 0.5) / max(slow - 0.5, 0.1) + 0.05


def test_two_stages_on_two_ranks_train_as_on_one(launch: Launch) -> None:
    """The steps of one rank see the batches of both. At the example's own rate rounding grows to one per cent."""
    short = ("--epochs=2", "--lr=0.05")
    together = launch([*MODEL_PARALLEL, *short], env=HOROVOD).stdout
    check_line("model_parallel.py", together)
    two = numbers(rf"loss {DECIMAL} on 2 ranks", together)
    alone = launch([sys.executable, MODEL_PARALLEL[-1], *short, "--batch-size=64"]).stdout
    assert two == pytest.approx(numbers(rf"loss {DECIMAL} on 1 ranks", alone), abs=2e-4)
    assert falls(two)


def test_cifar10_is_timed_beside_one_process_and_goes_on_from_its_snapshot(launch: Launch) -> None:
    """On one rank, too."""
    short = ("--limit=64", "--batch-size=8", "--lr=0.01", "--snapshots=kept")
    text = launch([*CIFAR10, *short, "--epochs=2"]).stdout
    check_line("cifar10.py", text)
    assert len(numbers(r"one process, without dualdist: (\d+) images/s", text)) == 1
    speeds, ratios = numbers(r"(\d+) images/s on 2 ranks", text), numbers(rf"{DECIMAL} times one process", text)
    assert speeds[0] / ratios[0] == pytest.approx(speeds[1] / ratios[1], rel=0.05)
    more = launch([sys.executable, CIFAR10[-1], *short, "--epochs=3", "--workers=1"]).stdout
    assert re.search(rf"^epoch 3/3: loss {DECIMAL}, .* images/s on 1 ranks, ", more, re.MULTILINE), more
    assert "epoch 2/3" not in more
    assert falls(numbers(rf"loss {DECIMAL}", text + more))


def test_imagenet_goes_on_where_it_was(launch: Launch) -> None:
    """With another number of epochs, on another backend; and another run begins with what was learned."""
    short = ("--image-size=32", "--limit=48", "--batch-size=8", "--checkpoints=run", "--seed=1", "--lr=0.032")
    first = launch([*IMAGENET, *short, "--epochs=1"]).stdout  # with as many workers as a rank has cores
    assert re.match(rf"epoch 1/1: loss {DECIMAL}, .* lr 0.00200\nevery", first), first
    short = (*short, "--workers=0")
    again = launch([*IMAGENET, *short, "--epochs=3"], env=HOROVOD).stdout
    half_and_none = r"epoch 2/3: .* lr 0.00100\nepoch 3/3: .* lr 0.00000\nevery"
    resumed = rf"goes on with epoch 2, best so far {DECIMAL}\n{half_and_none}"
    assert re.match(resumed, again), again
    check_line("imagenet.py", again)
    assert falls(numbers(rf"loss {DECIMAL}", first + again))
    newest = max((launch.directory / "run").glob("*.pt"))
    alone = [sys.executable, next(word for word in IMAGENET if word.endswith(".py")), *short[:2], short[-1]]
    last = launch([*alone, f"--pretrained={newest}", "--epochs=0", "--plot"]).stdout
    assert last == again.splitlines(keepends=True)[-1]
    (accuracy,) = re.findall(r"epoch 3/3: loss [\d.]+, (top-1 [\d.]+, top-5 [\d.]+),", again)
    together = launch([*IMAGENET, *short, "--evaluate"]).stdout
    assert together == f"evaluated: {accuracy}\n"
    theirs = {"state_dict": {f"module.{k}": v for k, v in torch.load(newest, weights_only=True)["model"].items()}}
    torch.save(theirs, launch.directory / "theirs.pth")
    same_batches = [word for word in short if not word.startswith("--checkpoints")]  # others round differently
    assert launch([*IMAGENET, *same_batches, "--evaluate", "--pretrained=theirs.pth"]).stdout == together
    torch.save({"fc": torch.zeros(1)}, launch.directory / "other.pth")
    for words, error in (
        (["--pretrained=other.pth"], "imagenet.py: error: --pretrained other.pth: Error(s) in loading state_dict"),
        (["--checkpoints=none"], "imagenet.py: error: --checkpoints none: holds no checkpoint to evaluate"),
        ([], "imagenet.py: error: --evaluate: needs --pretrained FILE or --checkpoints DIR"),
    ):
        assert error in launch([*alone, "--evaluate", *words], check=False).stderr


def test_mingpt_learns_and_its_curves_are_kept(launch: Launch) -> None:
    text = launch([*GPT, "--steps=12", "--write=40"]).stdout
    check_line("mingpt.py", text)
    losses = numbers(rf"step \d+/12: loss {DECIMAL}", text)
    assert falls(losses)
    agreed = re.search(r"^every rank has the parameters [0-9a-f]{16}\n", text, re.MULTILINE)
    assert agreed, text
    assert len(text[agreed.end() :]) == 42  # the first character, what follows, and the end of the line
    assert (launch.directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert kept_curve(launch.directory / "runs") == pytest.approx(losses, abs=1e-4)


def test_mingpt_ends_with_the_same_bits_after_a_restart_in_the_middle_of_an_epoch(launch: Launch) -> None:
    short = [*GPT[: GPT.index("--tensorboard")], "--batch-size=4", "--write=0"]
    whole, first, again = (
        launch([*short, f"--steps={steps}", *words]).stdout
        for steps, *words in ((7,), (3, "--every=2", "--snapshots=kept"), (7, "--snapshots=kept"))
    )
    assert again.startswith("goes on after step 3\n")
    ends = [re.findall("^every rank has the parameters .*$", text, re.MULTILINE) for text in (whole, again, first)]
    assert ends[0] == ends[1] != ends[2]
    assert len(list((launch.directory / "kept").glob("*.pt"))) == 3  # after steps 2, 3 and 7


def kept_curve(folder: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars("loss")]


def test_a_killed_rank_changes_no_parameter(launch: Launch) -> None:
    """They equal those of an undisturbed run on another backend to the bit."""
    killed = launch([*KILLED, "--epochs=1"]).stdout.splitlines()
    assert killed[:3] == [
        "2 ranks begin with step 0, at image 0 of epoch 0",
        "rank 1 is killed at step 25",
        "2 ranks begin with step 20, at image 640 of epoch 0",
    ]
    undisturbed = ["--epochs=1", "--checkpoints=other"]
    calm = launch([*KILLED[: KILLED.index("--kill")], *undisturbed], env=HOROVOD).stdout.splitlines()
    assert calm[0] == killed[0]
    assert calm[1:] == killed[3:]
    check_line("fault_tolerance.py", calm[1])
    assert "done after step 45: " in calm[1]


def test_a_horovod_script_trains_the_same_on_both_backends_and_on_horovod_alone(launch: Launch) -> None:
    native, below, alone = (
        launch([*argv, "--epochs=2"]).stdout.splitlines() for argv in (SCRIPT, SCRIPT_ON_HOROVOD, SCRIPT_ALONE)
    )
    assert len(native) == 2
    check_line("horovod_script.py", native[-1])
    assert falls(numbers(rf"loss {DECIMAL}", "\n".join(native)))
    assert below == native
    # horovodrun prefixes what its ranks print, and a line's end on its own where that comes apart from the line.
    assert re.findall(r"epoch \d+/\d+: loss [\d.]+", "\n".join(alone)) == native

"""The options of examples/train.py: flags over --config over defaults, and one line for whatever is wrong."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

EXAMPLES = str(Path(__file__).parents[2] / "examples")


class Train(NamedTuple):
    FLAGS: dict[str, Any]
    parse: Callable[[list[str]], Namespace]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """The options as train.py takes them."""
    monkeypatch.syspath_prepend(EXAMPLES)
    options = importlib.import_module("common.options")
    return Train(options.FLAGS, lambda argv: options.parse(argv, "train.py", None))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def refusal(train: Train, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What train.py says when it refuses these flags: its last line on stderr."""
    with pytest.raises(SystemExit) as caught:
        train.parse(["--model=mlp", *argv])
    assert caught.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage == "usage: train.py [options]"
    return line


def test_defaults_hold_where_nothing_is_given(train: Train) -> None:
    options = train.parse([])
    assert (options.model, options.dataset, options.threads, options.backend) == ("resnet18", "digits", 1, None)


def test_file_wins_over_defaults_and_flags_win_over_the_file(train: Train, config: Path) -> None:
    config.write_text("model: mlp\nepochs: 7\nlr: 0.5\nbatch-size: 8\n")
    options = train.parse(["--lr", "0.25", "--config", str(config), "--epochs", "2"])
    assert (options.model, options.epochs, options.lr, options.batch_size) == ("mlp", 2, 0.25, 8)


def test_flag_with_the_default_value_wins_over_the_file(train: Train, config: Path) -> None:
    config.write_text("model: mlp\nepochs: 7\ndownload: true\n")
    options = train.parse(["--config", str(config), "--epochs", "3", "--no-download"])
    assert (options.epochs, options.download) == (3, False)


def test_keys_may_be_written_with_underscores(train: Train, config: Path) -> None:
    config.write_text("model: mlp\nbatch_size: 8\nweight_decay: 0\n")
    options = train.parse(["--config", str(config)])
    assert (options.batch_size, options.weight_decay) == (8, 0.0)


def test_exponents_that_yaml_takes_for_text_are_numbers(train: Train, config: Path) -> None:
    config.write_text("model: mlp\nlr: 1e-3\n")
    assert train.parse(["--config", str(config)]).lr == 0.001


def test_every_flag_is_a_key(train: Train, config: Path) -> None:
    values = {"bool": "true", "int": "9", "float": "0.5"}
    special = {"model": "mlp", "backend": "native", "dataset": "fake", "device": "cpu"}
    lines = []
    for name, settings in train.FLAGS.items():
        kind = "bool" if "action" in settings else getattr(settings.get("type"), "__name__", "str")
        lines.append(f"{name}: {special.get(name, values.get(kind, 'some text'))}\n")
    config.write_text("".join(lines))
    options = train.parse(["--config", str(config)])
    assert (options.download, options.max_steps, options.momentum, options.summary) == (True, 9, 0.5, "some text")


def test_empty_file_changes_nothing(train: Train, config: Path) -> None:
    config.write_text("# nothing yet\n")
    assert train.parse(["--model=mlp", "--config", str(config)]).epochs == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 3", "unknown key 'epoch'; did you mean 'epochs'?"),
        ("learning_rate: 3", "unknown key 'learning_rate'; did you mean '"),
        ("config: other.yaml", "unknown key 'config'; did you mean '"),
        ("3: 3", "unknown key 3; did you mean '"),
        ("epochs: three", "epochs: expected int, not 'three'"),
        ("epochs: '3'", "epochs: expected int, not '3'"),
        ("epochs: 2.5", "epochs: expected int, not 2.5"),
        ("epochs: true", "epochs: expected int, not True"),
        ("epochs:", "epochs: expected int, not None"),
        ("epochs: [3]", "epochs: expected int, not [3]"),
        ("lr: true", "lr: expected float, not True"),
        ("lr: fast", "error: argument --lr: invalid float value: 'fast'"),
        ("lr: .nan", "error: argument --lr: nan is not 0 or more"),
        ("download: 1", "download: expected bool, not 1"),
        ("data: 5", "data: expected str, not 5"),
        ("batch_size: 0", "error: argument --batch-size: 0 is not 1 or more"),
        ("backend: mpich", "error: argument --backend: invalid choice: 'mpich'"),
        ("- epochs", "expected lines such as `epochs: 3`, not a list"),
        ("epochs: {", "while parsing a flow"),
    ],
)
def test_wrong_file_is_refused_by_file_and_key(
    train: Train, config: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    config.write_text(text)
    line = refusal(train, capsys, "--config", str(config))
    assert line.startswith("train.py: ")
    assert f"--config {config}: " in line
    assert words in line


def test_missing_file_is_refused_by_name(train: Train, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refusal(train, capsys, "--config", str(config))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch-size", "0"], "--batch-size: 0 is not 1 or more"),
        (["--lr", "-1"], "--lr: -1 is not 0 or more"),
        (["--lr", "inf"], "--lr: inf is not 0 or more"),
        (["--epoch", "1"], "unrecognized arguments: --epoch 1"),
        (["--model", "resnet19"], "--model resnet19: unknown; did you mean 'resnet1"),
        (["--model", "inception_v3"], "--model inception_v3: unknown"),
        (["--dataset", "cifar10", "--data", "nowhere"], "--data nowhere: holds no folder cifar-10-batches-py"),
        (["--dataset", "mnist", "--data", "nowhere"], "--data nowhere: holds no folder MNIST/raw"),
    ],
)
def test_wrong_flag_is_refused_with_one_line(
    train: Train, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert words in refusal(train, capsys, *argv)


def test_data_folder_that_holds_cifar10_is_accepted(train: Train, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert train.parse(["--model=mlp", "--dataset=cifar10", f"--data={tmp_path}"]).data == str(tmp_path)

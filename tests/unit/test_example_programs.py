"""The examples' options (flags over --config over defaults, one line for whatever is wrong) and data sets."""

import gzip
import hashlib
import importlib
import pickle
import struct
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("common.options")


def refusal(options: ModuleType, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What train.py says when it refuses these flags: its last line on stderr."""
    with pytest.raises(SystemExit) as caught:
        options.parse(["--model=mlp", *argv], "train.py", None)
    assert caught.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage == "usage: train.py [options]"
    return line


@pytest.mark.parametrize(
    ("text", "argv", "expected"),
    [
        ("", [], {"model": "resnet18", "dataset": "digits", "threads": 1, "backend": None}),
        ("# nothing yet\n", ["--model=mlp"], {"model": "mlp", "epochs": 3}),
        ("model: mlp\nepochs: 7\nlr: 0.5\nbatch-size: 8\n", ["--lr", "0.25", "--epochs", "2"],
         {"model": "mlp", "epochs": 2, "lr": 0.25, "batch_size": 8}),
        ("model: mlp\nepochs: 7\ndownload: true\n", ["--epochs=3", "--no-download"], {"epochs": 3, "download": False}),
        ("model: mlp\nbatch_size: 8\nweight_decay: 0\n", [], {"batch_size": 8, "weight_decay": 0.0}),
        ("model: mlp\nlr: 1e-3\n", [], {"lr": 0.001}),
    ],
)  # fmt: skip
def test_flags_win_over_the_file_and_the_file_over_defaults(
    options: ModuleType, tmp_path: Path, text: str, argv: list[str], expected: dict[str, Any]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    found = vars(options.parse(["--config", str(config), *argv], "train.py", None))
    assert {name: found[name] for name in expected} == expected


def test_every_flag_is_a_key(options: ModuleType, tmp_path: Path) -> None:
    values = {"bool": "true", "int": "9", "float": "0.5"}
    special = {"model": "mlp", "backend": "native", "dataset": "fake", "device": "cpu"}
    lines = []
    for name, settings in options.FLAGS.items():
        kind = "bool" if "action" in settings else getattr(settings.get("type"), "__name__", "str")
        lines.append(f"{name}: {special.get(name, values.get(kind, 'some text'))}\n")
    config = tmp_path / "run.yaml"
    config.write_text("".join(lines))
    found = options.parse(["--config", str(config)], "train.py", None)
    assert (found.download, found.max_steps, found.momentum, found.summary) == (True, 9, 0.5, "some text")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 3", "unknown key 'epoch'; did you mean 'epochs'?"),
        ("learning_rate: 3", "unknown key 'learning_rate'; did you mean '"),
        ("config: other.yaml", "unknown key 'config'; did you mean '"),
        ("3: 3", "unknown key 3; did you mean '"),
        ("epochs: three", "epochs: expected int, not 'three'"),
        ("epochs: true", "epochs: expected int, not True"),
        ("epochs:", "epochs: expected int, not None"),
        ("lr: true", "lr: expected float, not True"),
        ("lr: .nan", "error: argument --lr: nan is not 0 or more"),
        ("download: 1", "download: expected bool, not 1"),
        ("data: 5", "data: expected str, not 5"),
        ("backend: mpich", "error: argument --backend: invalid choice: 'mpich'"),
        ("- epochs", "expected lines such as `epochs: 3`, not a list"),
        ("epochs: {", "while parsing a flow"),
    ],
)
def test_wrong_file_is_refused_by_file_and_key(
    options: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    line = refusal(options, capsys, "--config", str(config))
    assert line.startswith("train.py: ")
    assert f"--config {config}: " in line
    assert words in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "nowhere.yaml"], "No such file"),
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
    options: ModuleType, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert words in refusal(options, capsys, *argv)


IMAGES = 6


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for variable in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):  # which scikit-learn sets when it is imported
        monkeypatch.setenv(variable, "")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("common.data")


def test_digits_are_those_of_scikit_learn_split_alike_every_time(data: ModuleType) -> None:
    (train, validation), (again, _) = data.digits(size=16), data.digits(size=16)
    assert (len(train), len(validation)) == (1437, 360)
    assert train.indices == again.indices
    assert not set(train.indices) & set(validation.indices)
    image, label = train[0]
    assert image.shape == (3, 16, 16)
    assert 0 <= label < 10
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    dataset = data.digits(channels=1)[0].dataset
    torch.testing.assert_close(dataset.tensors[0].flatten(1), (torch.tensor(pixels).float() / 16 - 0.3) / 0.4)
    assert dataset.tensors[1].tolist() == labels.tolist()
    train, validation = data.limited(data.digits(), 100)
    assert (len(train), len(validation)) == (100, 100)
    assert [len(part) for part in data.limited(data.digits(), None)] == [1437, 360]


def test_cifar10_is_read_where_it_lies(
    options: ModuleType, data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in CIFAR-10's format, whose checksums stand for those of the real ones."""
    folder = tmp_path / data.FOLDERS["cifar10"]
    folder.mkdir()
    kind = data.load_torchvision().datasets.CIFAR10

    def written(name: str, content: dict[str, object]) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    names = [name for name, _ in (*kind.train_list, *kind.test_list)]
    pixels = np.full((IMAGES, 3 * 32 * 32), 255, dtype=np.uint8)
    sums = {name: written(name, {"data": pixels, "labels": list(range(IMAGES))}) for name in names}
    meta = written(kind.meta["filename"], {kind.meta["key"]: list("abcdefghij")})
    monkeypatch.setattr(kind, "train_list", [[name, sums[name]] for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [[name, sums[name]] for name, _ in kind.test_list])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": meta})
    argv = ["--model=mlp", "--dataset=cifar10", f"--data={tmp_path}"]
    train, validation = data.cifar10(options.parse(argv, "train.py", None).data)
    assert (len(train), len(validation)) == (5 * IMAGES, IMAGES)
    image, label = validation[3]
    assert (image.shape, label) == ((3, 32, 32), 3)
    assert image[:, 0, 0].tolist() == pytest.approx([(1 - 0.491) / 0.247, (1 - 0.482) / 0.243, (1 - 0.447) / 0.262])


def test_mnist_is_read_where_it_lies(data: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / data.FOLDERS["mnist"]
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = struct.pack(">4i", 2051, IMAGES, 28, 28) + bytes(IMAGES * 28 * 28)
        labels = struct.pack(">2i", 2049, IMAGES) + bytes(range(IMAGES))
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            (folder / name).write_bytes(content)
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    train, validation = data.mnist(str(tmp_path), size=32)
    assert (len(train), len(validation)) == (IMAGES, IMAGES)
    image, label = train[2]
    assert (image.shape, label) == ((3, 32, 32), 2)


def test_imagenet_is_read_where_it_lies(data: ModuleType, tmp_path: Path) -> None:
    imagenet = importlib.import_module("imagenet")
    for part in ("train", "val"):
        for kind in ("cat", "dog"):
            folder = tmp_path / part / kind
            folder.mkdir(parents=True)
            Image.new("RGB", (80, 60)).save(folder / "first.jpeg")
    options = Namespace(data=str(tmp_path), image_size=56, limit=None)
    for part in (imagenet.load_data(options, training=is_training) for is_training in (True, False)):
        assert [label for _, label in part] == [0, 1]
        assert part[0][0].shape == (3, 56, 56)
        assert part[0][0].dtype == torch.float32


def test_what_cannot_be_trained_on_ends_with_a_line(data: ModuleType, tmp_path: Path) -> None:
    def fails() -> None:
        raise OSError("no route to host")

    with pytest.raises(SystemExit, match=r"error: could not download MNIST to here: no route to host"):
        data.once_a_node(fails, "download MNIST to here")
    train, _ = data.limited(data.digits(), 7)
    loaders = [torch.utils.data.DataLoader(train, count, drop_last=True) for count in (7, 8)]
    assert data.not_empty(loaders[0]) is loaders[0]
    with pytest.raises(SystemExit, match="error: 7 samples do not fill a batch of 8 on each of 1 ranks"):
        data.not_empty(loaders[1])


def test_the_learning_rate_warms_up_and_ends_at_zero(data: ModuleType) -> None:
    factor = importlib.import_module("imagenet").schedule(warmup=4, steps=12)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factor(8) == pytest.approx(0.5)
    assert factor(12) == pytest.approx(0.0)
    never_down = importlib.import_module("imagenet").schedule(warmup=12, steps=12)
    assert [never_down(step) for step in (0, 11, 12)] == pytest.approx([1 / 12, 1, 1])

"""The kept wheels and the record inside: whole or not there."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from dualdist.errors import BuildError
from dualdist.horovod_build import install as cache
from dualdist.horovod_build.record import RECORD_NAME, BuildRecord, from_json, to_json

NAME = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
RECORD = BuildRecord(horovod="0.28.1", torch="2.13.0+cpu", mpi=True, patches=("a: b",), key="k1")


def make_wheel(folder: Path, record: BuildRecord = RECORD) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        archive.writestr("horovod/torch/mpi_lib_v2.so", os.urandom(20_000))
        archive.writestr(f"horovod/{RECORD_NAME}", to_json(record))
    return folder / NAME


def test_a_kept_wheel_is_found_under_its_key_alone(tmp_path: Path) -> None:
    kept = cache.keep(make_wheel(tmp_path / "built"), tmp_path / "cache")
    assert cache.find(tmp_path / "cache", "k1") == kept
    assert cache.find(tmp_path / "cache", "k2") is None
    assert cache.find(tmp_path / "nowhere", "k1") is None
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [NAME]


def test_a_wheel_kept_twice_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache.keep(make_wheel(tmp_path / "first"), folder)
    second = make_wheel(tmp_path / "second")
    assert cache.keep(second, folder).read_bytes() == second.read_bytes()


@pytest.mark.parametrize("damage", ["cut short", "a flipped bit", "empty", "no record"])
def test_a_damaged_wheel_is_passed_over(tmp_path: Path, damage: str) -> None:
    wheel = make_wheel(tmp_path / "cache")
    data = bytearray(wheel.read_bytes())
    data[5_000] ^= 1
    if damage == "no record":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("horovod/__init__.py", "")
    else:
        wheel.write_bytes({"cut short": data[:9_000], "a flipped bit": data, "empty": b""}[damage])
    assert cache.find(tmp_path / "cache", "k1") is None


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        cache.keep(make_wheel(tmp_path / "built"), tmp_path / "cache" / "k1")


def test_forget_leaves_no_wheel(tmp_path: Path) -> None:
    make_wheel(tmp_path / "cache")
    cache.forget(tmp_path / "cache")
    cache.forget(tmp_path / "cache")
    assert cache.find(tmp_path / "cache", "k1") is None


def test_the_record_survives_its_file() -> None:
    assert from_json(to_json(RECORD)) == RECORD


def test_a_record_of_another_dualdist_is_read_as_far_as_it_is_known() -> None:
    assert from_json('{"horovod": "0.28.1", "later": 1}') == BuildRecord(horovod="0.28.1")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"torch": "2.13.0"}', "null"])
def test_a_damaged_record_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_json(text)

"""The wheel cache and the build record in a wheel."""

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


def test_a_cached_wheel_is_found_by_its_key_only(tmp_path: Path) -> None:
    cached = cache.cache_wheel(make_wheel(tmp_path / "built"), tmp_path / "cache")
    assert cache.find_wheel(tmp_path / "cache", "k1") == cached
    assert cache.find_wheel(tmp_path / "cache", "k2") is None
    assert cache.find_wheel(tmp_path / "nowhere", "k1") is None
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [NAME]


def test_caching_a_wheel_again_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache.cache_wheel(make_wheel(tmp_path / "first"), folder)
    second = make_wheel(tmp_path / "second")
    assert cache.cache_wheel(second, folder).read_bytes() == second.read_bytes()


@pytest.mark.parametrize("damage", ["cut short", "a flipped bit", "empty", "no record"])
def test_a_damaged_wheel_is_ignored(tmp_path: Path, damage: str) -> None:
    wheel = make_wheel(tmp_path / "cache")
    data = bytearray(wheel.read_bytes())
    data[5_000] ^= 1
    if damage == "no record":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("horovod/__init__.py", "")
    else:
        wheel.write_bytes({"cut short": data[:9_000], "a flipped bit": data, "empty": b""}[damage])
    assert cache.find_wheel(tmp_path / "cache", "k1") is None


def test_a_cache_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        cache.cache_wheel(make_wheel(tmp_path / "built"), tmp_path / "cache" / "k1")


def test_a_record_survives_json() -> None:
    assert from_json(to_json(RECORD)) == RECORD


def test_unknown_record_fields_are_ignored() -> None:
    assert from_json('{"horovod": "0.28.1", "later": 1}') == BuildRecord(horovod="0.28.1")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"torch": "2.13.0"}', "null"])
def test_a_damaged_record_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_json(text)

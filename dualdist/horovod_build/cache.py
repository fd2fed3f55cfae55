"""The wheels kept in the user's cache: found only if whole, added in one step."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

from dualdist.errors import BuildError
from dualdist.horovod_build.record import RECORD_NAME, from_json


def find(folder: Path, key: str) -> Path | None:
    """The whole wheel in the folder that was built under the key; damaged ones are passed over."""
    return next((wheel for wheel in sorted(folder.glob("*.whl")) if is_whole(wheel, key)), None)


def is_whole(wheel: Path, key: str) -> bool:
    """Every byte of the wheel fits its checksum, and its record names the key."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = from_json(archive.read(f"horovod/{RECORD_NAME}").decode())
            return archive.testzip() is None and record.key == key
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return False


def keep(wheel: Path, folder: Path) -> Path:
    """The wheel stands in the folder, instead of one of its name; a reader sees the old one or the new one, whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
            copy = Path(shutil.copyfile(wheel, Path(part) / wheel.name))
            return copy.replace(folder / wheel.name)
    except OSError as error:
        raise BuildError(
            f"the wheel could not be kept in {folder}: {error}; make room there, or set XDG_CACHE_HOME"
        ) from error


def forget(folder: Path) -> None:
    """No wheel lies in the folder."""
    for wheel in folder.glob("*.whl"):
        with contextlib.suppress(FileNotFoundError):
            wheel.unlink()

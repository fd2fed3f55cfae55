"""Checkpoints on disk: each with its checksum, the newest good one found and read, and no code of any run.

Note [seal]: a checkpoint is what torch.save writes, a zip archive, and says in the archive's comment what the SHA-256
of all bytes before the comment is. zip readers, torch.load among them, skip the comment; whatever of the file is
missing or has been altered, the seal does not fit.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from dualdist.errors import CheckpointError

NAME = "checkpoint-{:08d}.pt"
PATTERN = re.compile(r"checkpoint-(\d{8,})\.pt")
NAMED = ".pt"  # a path that ends so means a file
# Of what a checkpoint holds: what is not a program's object.
METADATA = "dualdist"
EXTRA = "extra"
# Arguments that say how to save and load: a part of that name would be taken for one, or the other way round.
OPTIONS = ("async_op", "random", "required")
FORMAT = 1
MARK = b"dualdist sha256 "
SEAL_BYTES = 2 + len(MARK) + 64  # the comment's length, which ends every archive, and the comment
ARCHIVE = b"PK\x03\x04"
CHUNK_BYTES = 1 << 22


class ReadProgress:
    """How far a file has come; another thread looks at it, and may give the file up."""

    nbytes = 0
    is_abandoned = False  # the program goes on without the file, which must not appear any more

    def require_awaited(self) -> None:
        if self.is_abandoned:
            raise InterruptedError(None, "it was given up")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was read, those of its folder that are newer, and why they were not taken."""

    path: Path
    content: dict[str, Any]
    newer: tuple[Path, ...] = ()
    refused: tuple[str, ...] = ()


def checkpoints(folder: Path) -> list[Path]:
    """The folder's checkpoints, good or not, the newest first; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((folder / name for name in names if PATTERN.fullmatch(name)), key=number_of, reverse=True)


def number_of(path: Path) -> int:
    """Of the n-th checkpoint of its folder, n."""
    return int(path.stem.rpartition("-")[2])


def read_newest(path: Path, progress: ReadProgress) -> FoundCheckpoint | None:
    """The newest good checkpoint of a folder, or the one that the path names; None where there is none yet.

    CheckpointError where there are only bad ones, or not the file that the path names.
    """
    refused: list[str] = []
    try:
        if path.is_file():
            return FoundCheckpoint(path, read(path, progress), _newer(path))
        candidates = checkpoints(path)
        if not candidates and path.suffix == NAMED and not path.is_dir():
            raise FileNotFoundError(None, "there is no such file; name a folder where there may be none yet")
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {path}: {reason(error)}") from error
    for number, candidate in enumerate(candidates):
        try:
            return FoundCheckpoint(candidate, read(candidate, progress), tuple(candidates[:number]), tuple(refused))
        except CheckpointError as error:
            refused.append(str(error))
    if refused:
        raise CheckpointError(f"no checkpoint in {path} is good: {'; '.join(refused)}")
    return None


def _newer(path: Path) -> tuple[Path, ...]:
    """The checkpoints of its folder that are newer than this one."""
    siblings = checkpoints(path.parent) if PATTERN.fullmatch(path.name) else []
    return tuple(each for each in siblings if number_of(each) > number_of(path))


def read(path: Path, progress: ReadProgress) -> dict[str, Any]:
    """What the file holds; CheckpointError where it is not as it was written, and no code of it is run."""
    try:
        with io.BufferedReader(_Counted(path, progress)) as opened:
            file = cast(IO[bytes], opened)
            _require_seal(path, file)
            _require_archive(path, file)
            file.seek(0)
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever torch makes of a file that a stranger has sealed
        raise CheckpointError(f"{path} is refused by torch.load(weights_only=True): {_load_error(error)}") from error
    about, extra = (content.get(METADATA), content.get(EXTRA)) if isinstance(content, dict) else (None, None)
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(extra, dict):
        raise CheckpointError(f"{path} is no checkpoint of this version of dualdist: expected format {FORMAT} in it")
    return cast(dict[str, Any], content)


class _Counted(io.FileIO):
    """A file, of which whatever the disk gives is counted, to whoever reads."""

    def __init__(self, path: Path, progress: ReadProgress) -> None:
        super().__init__(path, opener=_opened)
        self._progress = progress

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._progress.nbytes += count or 0
        return count


def _opened(path: str, flags: int) -> int:
    """The file, open; OSError for what is none: a pipe would be waited for until somebody writes to it."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(None, "it is no file")


def seal(digest: str) -> bytes:
    """What ends a file of this SHA-256, from the length of the archive's comment on: Note [seal]."""
    comment = MARK + digest.encode()
    return len(comment).to_bytes(2, "little") + comment


def _require_seal(path: Path, file: IO[bytes]) -> None:
    """CheckpointError unless the file is as it was written: Note [seal]."""
    left = os.fstat(file.fileno()).st_size - SEAL_BYTES
    digest = hashlib.sha256()
    while left > 0 and (piece := file.read(min(left, CHUNK_BYTES))):
        digest.update(piece)
        left -= len(piece)
    digest.update(b"\0\0")  # the comment's length, as torch wrote it
    end = file.read()
    if end == seal(digest.hexdigest()):
        return
    if not end[2:].startswith(MARK):
        raise CheckpointError(f"{path} is truncated, or no checkpoint: it does not end in a checksum")
    raise CheckpointError(f"{path} has been altered: its content does not fit its checksum")


def _require_archive(path: Path, file: IO[bytes]) -> None:
    """CheckpointError unless it is a zip archive of tensors.

    torch before 2.6 runs TorchScript's archives, weights_only=True or not.
    """
    file.seek(0)
    if file.read(len(ARCHIVE)) == ARCHIVE:
        with zipfile.ZipFile(file) as archive:
            if not any(name.endswith("constants.pkl") for name in archive.namelist()):
                return
    raise CheckpointError(f"{path} is refused: it is not an archive of torch.save, or one of code")


def reason(error: OSError) -> str:
    """Why the disk failed, in its words."""
    return error.strerror or str(error)


def _load_error(error: Exception) -> str:
    """What torch says, without its advice to load the file as code."""
    lines = [
        line.strip() for line in str(error).splitlines() if "global" in line.lower() and "weights_only" not in line
    ]
    return (lines or str(error).splitlines() or [type(error).__name__])[0]

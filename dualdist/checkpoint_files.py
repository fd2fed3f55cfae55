"""Checkpoints on disk: written whole or not at all, each with its checksum, the newest good one found.

Note [seal]: a checkpoint is what torch.save writes, a zip archive, and says in the archive's comment what the SHA-256
of all bytes before the comment is. zip readers, torch.load among them, skip the comment; whatever of the file is
missing or has been altered, the seal does not fit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from dualdist.errors import CheckpointError

NAME = "checkpoint-{:08d}.pt"
PATTERN = re.compile(r"checkpoint-(\d{8,})\.pt")
NAMED = ".pt"  # a path that ends so means a file
DRAFTS = ".checkpoint-*.draft"
# Of what a checkpoint holds: what is not a program's object.
ABOUT = "dualdist"
EXTRA = "extra"
FORMAT = 1
MARK = b"dualdist sha256 "
SEAL_BYTES = 2 + len(MARK) + 64  # the comment's length, which ends every archive, and the comment
ARCHIVE = b"PK\x03\x04"
CHUNK_BYTES = 1 << 22
# So that the disk keeps pace, and a slow one shows that it moves.
SYNC_BYTES = 1 << 28
# What a file system says that has no hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class Progress:
    """How far a file has come; another thread looks at it, and may give the file up."""

    nbytes = 0
    is_abandoned = False  # the program goes on without the file, which must not appear any more

    def require_awaited(self) -> None:
        if self.is_abandoned:
            raise InterruptedError(None, "it was given up")


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read, and why newer ones were not."""

    path: Path
    content: dict[str, Any]
    refused: tuple[str, ...] = ()


def write(folder: Path, content: dict[str, Any], keep: int | None, progress: Progress) -> Path:
    """A new file in the folder holds the content, on the disk itself; of its kind the last `keep` are left.

    CheckpointError where that fails; the older ones are as they were then.
    """
    try:
        _make(folder)
        _remove_abandoned(folder)
        path = folder / NAME.format(max(map(number_of, checkpoints(folder)), default=0) + 1)
    except OSError as error:
        raise CheckpointError(f"cannot save to {folder}: {_reason(error)}") from error
    draft = folder / f".{path.stem}.{secrets.token_hex(4)}.draft"
    try:
        _write_draft(draft, content, progress)
        path = _publish(draft, path, progress)
        _sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {_reason(error)}, after {progress.nbytes / 1e6:.1f} MB; {_newest_words(folder)}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    try:
        for old in checkpoints(folder)[keep:] if keep else ():
            old.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"saved {path}, but cannot remove older ones: {_reason(error)}") from error
    return path


def _newest_words(folder: Path) -> str:
    with contextlib.suppress(OSError):
        for newest in checkpoints(folder):
            return f"{newest.name} is still there"
    return "there is no earlier one"


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


def read_newest(path: Path, progress: Progress) -> Found | None:
    """The newest good checkpoint of a folder, or the one that the path names; None where there is none yet.

    CheckpointError where there are only bad ones, or not the file that the path names.
    """
    refused: list[str] = []
    try:
        if path.is_file():
            return Found(path, read(path, progress))
        candidates = checkpoints(path)
        if not candidates and path.suffix == NAMED and not path.is_dir():
            raise FileNotFoundError(None, "there is no such file; name a folder where there may be none yet")
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {path}: {_reason(error)}") from error
    for candidate in candidates:
        try:
            return Found(candidate, read(candidate, progress), tuple(refused))
        except CheckpointError as error:
            refused.append(str(error))
    if refused:
        raise CheckpointError(f"no checkpoint in {path} is good: {'; '.join(refused)}")
    return None


def read(path: Path, progress: Progress) -> dict[str, Any]:
    """What the file holds; CheckpointError where it is not as it was written, and no code of it is run."""
    try:
        with path.open("rb") as file:
            _require_seal(path, file, progress)
            _require_archive(path, file)
            file.seek(0)
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever torch makes of a file that a stranger has sealed
        raise CheckpointError(f"{path} is refused by torch.load(weights_only=True): {_told(error)}") from error
    about, extra = (content.get(ABOUT), content.get(EXTRA)) if isinstance(content, dict) else (None, None)
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(extra, dict):
        raise CheckpointError(f"{path} is no checkpoint of this version of dualdist: expected format {FORMAT} in it")
    return cast(dict[str, Any], content)


def _make(folder: Path) -> None:
    """The folder exists; its parent must, lest a disk that is not mounted goes unnoticed."""
    if folder.is_dir():
        return
    if folder.exists():
        raise NotADirectoryError(None, "it is a file; name a folder")
    if not folder.parent.is_dir():
        raise FileNotFoundError(None, f"there is no folder {folder.parent}; make it, or mount what belongs there")
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _write_draft(draft: Path, content: dict[str, Any], progress: Progress) -> None:
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb", CHUNK_BYTES) as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hashing = _Hashing(file, progress)
        try:
            torch.save(content, cast(IO[bytes], hashing))
        except RuntimeError:
            if hashing.error is not None:  # torch's own error does not name it
                raise hashing.error from None
            raise
        progress.require_awaited()
        file.seek(-2, os.SEEK_END)
        file.write(_seal(hashing.digest()))
        file.flush()
        os.fsync(file.fileno())


def _publish(draft: Path, path: Path, progress: Progress) -> Path:
    """The draft has this name, or where that is taken by now the next one that is not; no file is written over."""
    while True:
        progress.require_awaited()
        try:
            os.link(draft, path)
            return path
        except FileExistsError:
            if path.samefile(draft):  # NFS may say so of its own second try
                return path
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if not path.exists():
                os.rename(draft, path)
                return path
        path = path.with_name(NAME.format(number_of(path) + 1))


class _Hashing:
    """Passes on what torch writes, hashes and counts it, and remembers why that failed."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self.error: OSError | None = None
        self._file = file
        self._hash = hashlib.sha256()
        self._progress = progress
        self._synced = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                self._pass_on(view[start : start + CHUNK_BYTES])
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """torch's writers call it."""

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _pass_on(self, piece: memoryview) -> None:
        self._progress.require_awaited()
        self._file.write(piece)
        self._hash.update(piece)
        self._progress.nbytes += len(piece)
        self._synced += len(piece)
        if self._synced >= SYNC_BYTES:
            self._synced = 0
            self._file.flush()
            os.fsync(self._file.fileno())


def _seal(digest: str) -> bytes:
    comment = MARK + digest.encode()
    return len(comment).to_bytes(2, "little") + comment


def _require_seal(path: Path, file: IO[bytes], progress: Progress) -> None:
    """CheckpointError unless the file is as it was written: Note [seal]."""
    left = os.fstat(file.fileno()).st_size - SEAL_BYTES
    digest = hashlib.sha256()
    while left > 0 and (piece := file.read(min(left, CHUNK_BYTES))):
        digest.update(piece)
        progress.nbytes += len(piece)
        left -= len(piece)
    digest.update(b"\0\0")  # the comment's length, as torch wrote it
    seal = file.read()
    if seal == _seal(digest.hexdigest()):
        return
    if not seal[2:].startswith(MARK):
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


def _remove_abandoned(folder: Path) -> None:
    """Drafts of processes that were killed are gone; one that is being written is locked."""
    for draft in folder.glob(DRAFTS):
        with contextlib.suppress(OSError), draft.open("r+b") as file:  # NFS locks what may be written to only
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def _sync_folder(folder: Path) -> None:
    """What was made or renamed in the folder is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _told(error: Exception) -> str:
    """What torch says, without its advice to load the file as code."""
    lines = [
        line.strip() for line in str(error).splitlines() if "global" in line.lower() and "weights_only" not in line
    ]
    return (lines or str(error).splitlines() or [type(error).__name__])[0]

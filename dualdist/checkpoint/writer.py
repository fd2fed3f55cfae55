"""Checkpoints onto the disk: written whole or not at all, and older ones removed once newer ones are there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch

from dualdist.checkpoint.files import CHUNK_BYTES, NAME, ReadProgress, checkpoints, number_of, reason, seal
from dualdist.errors import CheckpointError

DRAFTS = ".checkpoint-*.draft"
# So that the disk keeps pace, and a slow one shows that it moves.
SYNC_BYTES = 1 << 28
# What a file system says that has no hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def write(
    folder: Path, content: dict[str, Any], keep: int | None, progress: ReadProgress, passed_over: Collection[Path] = ()
) -> Path:
    """A new file in the folder holds the content, on the disk itself; of its kind the last `keep` are left.

    Those that were passed over, whose paths are resolved, are not counted: the program went back behind them.
    CheckpointError where that fails; the older ones are as they were then.
    """
    try:
        _make(folder)
        _remove_abandoned(folder)
        path = folder / NAME.format(max(map(number_of, checkpoints(folder)), default=0) + 1)
    except OSError as error:
        raise CheckpointError(f"cannot save to {folder}: {reason(error)}") from error
    draft = folder / f".{path.stem}.{secrets.token_hex(4)}.draft"
    try:
        _write_draft(draft, content, progress)
        path = _publish(draft, path, progress)
        _sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {reason(error)}, after {progress.nbytes / 1e6:.1f} MB; {_newest_words(folder)}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    try:
        for old in _outdated(folder, keep, set(passed_over) - {path.resolve()}) if keep else ():
            old.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"saved {path}, but cannot remove older ones: {reason(error)}") from error
    return path


def _outdated(folder: Path, keep: int, uncounted: Collection[Path]) -> Iterator[Path]:
    """The files that are older than `keep` others; what is no file was not written here."""
    newer = 0
    for path in checkpoints(folder):
        if not path.is_file():
            continue
        if newer >= keep:
            yield path
        newer += path.resolve() not in uncounted


def _newest_words(folder: Path) -> str:
    with contextlib.suppress(OSError):
        for newest in checkpoints(folder):
            return f"{newest.name} is still there"
    return "there is no earlier one"


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


def _write_draft(draft: Path, content: dict[str, Any], progress: ReadProgress) -> None:
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
        file.write(seal(hashing.digest()))
        file.flush()
        os.fsync(file.fileno())


def _publish(draft: Path, path: Path, progress: ReadProgress) -> Path:
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

    def __init__(self, file: IO[bytes], progress: ReadProgress) -> None:
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

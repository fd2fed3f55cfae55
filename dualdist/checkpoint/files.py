"""Checkpoint files: sealed with a checksum, written atomically, found, verified and read without running code.

Note [seal]: a checkpoint is the zip archive that torch.save writes, with the SHA-256 of all bytes before the archive's
comment as that comment. zip readers, torch.load among them, skip it; a truncated or altered file does not match.

Note [mapped tensors]: the tensors of a file that is read are its pages, mapped, which take no memory of their own until
they are copied into a program's tensors; release_pages() gives them back after that. No file is ever written to once it
has its name, so they stay as they were verified, also if another rank of the machine maps them.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import io
import mmap
import os
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch

from dualdist.collectives.tensor_utils import check_tensor, find_tensors
from dualdist.errors import CheckpointError, UnsupportedError, UsageError
from dualdist.utils.network_interfaces import boot_id
from dualdist.utils.regular_file import open_regular

NAME = "checkpoint-{:08d}.pt"
PATTERN = re.compile(r"checkpoint-(\d{8,})\.pt")
SUFFIX = ".pt"  # a path that ends so names a file, any other a folder
# Keys of a checkpoint that are not a program's objects.
METADATA = "dualdist"
EXTRA = "extra"
# Arguments of save_checkpoint and load_checkpoint, which cannot be names of parts.
OPTIONS = ("async_op", "random", "required")
FORMAT = 1
MARK = b"dualdist sha256 "
SEAL_BYTES = 2 + len(MARK) + 64  # two bytes hold the comment's length; the comment ends the archive
CHUNK_BYTES = 1 << 22
DRAFTS = ".checkpoint-*.draft"
# Bytes between two fsyncs: the disk keeps pace, and a slow one shows progress.
SYNC_BYTES = 1 << 28
# errno of file systems without hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
LIBC = ctypes.CDLL(None)
Identity = tuple[str, int, int, int, int]  # see _identity_of


class FileProgress:
    """Bytes read or written so far; another thread watches it and may abandon the file."""

    nbytes = 0
    is_abandoned = False  # the program continues without the file, which must not appear later

    def require_awaited(self) -> None:
        """Raise InterruptedError if the file was abandoned."""
        if self.is_abandoned:
            raise InterruptedError(None, "it was abandoned")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was read, the newer ones in its folder, and why those were refused.

    `content` is of mapped tensors: Note [mapped tensors]. `identity` is that of the file that was verified.
    """

    path: Path
    content: dict[str, Any]
    identity: Identity
    newer: tuple[Path, ...] = ()
    refused: tuple[str, ...] = ()


def checkpoints(folder: Path) -> list[Path]:
    """Return the folder's checkpoints, valid or not, newest first; [] if there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((folder / name for name in names if PATTERN.fullmatch(name)), key=number_of, reverse=True)


def real_path(path: Path) -> Path:
    """Return the path without symbolic links; not by resolve(), which raises RuntimeError for a loop of them."""
    return Path(os.path.realpath(path))


def number_of(path: Path) -> int:
    """Return the sequence number in a checkpoint's name."""
    return int(path.stem.rpartition("-")[2])


def read_newest(path: Path, progress: FileProgress) -> FoundCheckpoint | None:
    """Read the newest valid checkpoint of a folder, or the file that `path` names; None if the folder has none.

    Raises:
        CheckpointError: every checkpoint is invalid, or the named file is missing or invalid.
    """
    refused: list[str] = []
    try:
        if path.is_file():
            return replace(read(path, progress), newer=_newer(path))
        candidates = checkpoints(path)
        if not candidates and path.suffix == SUFFIX and not path.is_dir():
            raise FileNotFoundError(None, "there is no such file; pass a folder if there may be no checkpoint yet")
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {path}: {reason(error)}") from error
    for number, candidate in enumerate(candidates):
        try:
            found = read(candidate, progress)
            return replace(found, newer=tuple(candidates[:number]), refused=tuple(refused))
        except CheckpointError as error:
            refused.append(str(error))
    if refused:
        raise CheckpointError(f"no checkpoint in {path} is valid: {'; '.join(refused)}")
    return None


def _newer(path: Path) -> tuple[Path, ...]:
    siblings = checkpoints(path.parent) if PATTERN.fullmatch(path.name) else []
    return tuple(each for each in siblings if number_of(each) > number_of(path))


def read(path: Path, progress: FileProgress) -> FoundCheckpoint:
    """Read and verify a file without running code from it; CheckpointError if it is not as it was written."""
    try:
        with io.BufferedReader(_CountingFile(path, progress)) as opened:
            file = cast(IO[bytes], opened)
            _require_seal(path, file)
            content, identity = _mapped(file), _identity_of(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever torch raises for a file with a valid seal and foreign content
        raise CheckpointError(f"{path} is refused by torch.load(weights_only=True): {_load_error(error)}") from error
    try:
        for name, tensor in find_tensors(content):
            check_tensor(tensor, name, is_written=True)
    except (UsageError, UnsupportedError) as error:
        raise CheckpointError(f"{path} is refused: {error}") from error
    metadata, extra = (content.get(METADATA), content.get(EXTRA)) if isinstance(content, dict) else (None, None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT or not isinstance(extra, dict):
        raise CheckpointError(f"{path} is no checkpoint of this version of dualdist: expected format {FORMAT} in it")
    return FoundCheckpoint(path, cast(dict[str, Any], content), identity)


def read_again(path: str, identity: Identity) -> dict[str, Any] | None:
    """Return the content of a file that another process verified; None if it is not there, or not the same one."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return cast(dict[str, Any], _mapped(file)) if _identity_of(file) == identity else None
    except Exception:  # whatever a path of another container leads to
        return None


def _mapped(file: IO[bytes]) -> Any:
    """Return the content of this very file, wherever its path leads by now: Note [mapped tensors]."""
    return torch.load(f"/proc/self/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)


def _identity_of(file: IO[bytes]) -> Identity:
    """Return values that two processes find equal only if both have opened one file, on one machine."""
    found = os.fstat(file.fileno())
    return boot_id(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def release_pages(tensor: torch.Tensor) -> None:
    """Free the memory of a mapped tensor that was copied; its pages are read again if it is used again."""
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    # Only whole pages: the first and the last one may hold a part of another tensor.
    first = (start + page - 1) // page * page
    end = (start + tensor.nbytes) // page * page
    if tensor.is_contiguous() and first < end:
        LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


class _CountingFile(io.FileIO):
    """A file that adds the bytes read to a FileProgress."""

    def __init__(self, path: Path, progress: FileProgress) -> None:
        super().__init__(path, opener=open_regular)
        self._progress = progress

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._progress.nbytes += count or 0
        return count


def seal(digest: str) -> bytes:
    """Return the last bytes of a file of this SHA-256, from the comment's length on: Note [seal]."""
    comment = MARK + digest.encode()
    return len(comment).to_bytes(2, "little") + comment


def _require_seal(path: Path, file: IO[bytes]) -> None:
    """Raise CheckpointError unless the checksum matches: Note [seal]."""
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
    raise CheckpointError(f"{path} has been altered: its content does not match its checksum")


def reason(error: OSError) -> str:
    """Return the message of an OSError without errno and path."""
    return error.strerror or str(error)


def _load_error(error: Exception) -> str:
    """Return torch's message without its advice to load the file with weights_only=False."""
    lines = [
        line.strip() for line in str(error).splitlines() if "global" in line.lower() and "weights_only" not in line
    ]
    return (lines or str(error).splitlines() or [type(error).__name__])[0]


def write(
    folder: Path, content: dict[str, Any], keep: int | None, progress: FileProgress, uncounted: Collection[Path] = ()
) -> Path:
    """Write a new checkpoint, flush it to disk, remove all but the last `keep`, and return its path.

    `uncounted` are resolved paths of newer files that the program went back behind: they do not count towards `keep`.

    Raises:
        CheckpointError: the write failed; the earlier checkpoints are as they were.
    """
    path, draft = folder, folder / f".checkpoint-{secrets.token_hex(4)}.draft"
    try:
        _make_folder(folder)
        _remove_stale_drafts(folder)
        path = folder / NAME.format(max(map(number_of, checkpoints(folder)), default=0) + 1)
        _write_draft(draft, content, progress)
        path = _publish(draft, path, progress)
        _sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {path}: {reason(error)}, after {progress.nbytes / 1e6:.1f} MB; {_describe_newest(folder)}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    try:
        if keep:
            for old in _outdated(folder, keep, set(uncounted) - {real_path(path)}):
                old.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"saved {path}, but cannot remove older ones: {reason(error)}") from error
    return path


def _outdated(folder: Path, keep: int, uncounted: Collection[Path]) -> Iterator[Path]:
    """Yield the regular files that are older than `keep` others."""
    newer = 0
    for path in checkpoints(folder):
        if not path.is_file():
            continue
        if newer >= keep:
            yield path
        if real_path(path) not in uncounted:
            newer += 1


def _describe_newest(folder: Path) -> str:
    with contextlib.suppress(OSError):
        for newest in checkpoints(folder):
            return f"{newest.name} is still there"
    return "there is no earlier one"


def _make_folder(folder: Path) -> None:
    """Create the folder; its parent must exist, so that a disk that is not mounted is noticed."""
    if folder.is_dir():
        return
    if folder.exists():
        raise NotADirectoryError(None, "it is a file; name a folder")
    if not folder.parent.is_dir():
        raise FileNotFoundError(None, f"there is no folder {folder.parent}; create it, or mount its file system")
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _write_draft(draft: Path, content: dict[str, Any], progress: FileProgress) -> None:
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb", CHUNK_BYTES) as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hashing = _HashingWriter(file, progress)
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


def _publish(draft: Path, path: Path, progress: FileProgress) -> Path:
    """Link the draft to `path`, or to the next free number; never overwrite a file."""
    while True:
        progress.require_awaited()
        try:
            os.link(draft, path)
            return path
        except FileExistsError:
            if path.samefile(draft):  # NFS may report this for its own retry
                return path
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if not path.exists():
                os.rename(draft, path)
                return path
        path = path.with_name(NAME.format(number_of(path) + 1))


class _HashingWriter:
    """Forward torch's writes to a file, hash and count them, and keep the error that stopped them."""

    def __init__(self, file: IO[bytes], progress: FileProgress) -> None:
        self.error: OSError | None = None
        self._file = file
        self._hash = hashlib.sha256()
        self._progress = progress
        self._unsynced = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                self._progress.require_awaited()
                self._file.write(chunk)
                self._hash.update(chunk)
                self._progress.nbytes += len(chunk)
                self._unsynced += len(chunk)
                if self._unsynced >= SYNC_BYTES:
                    self._unsynced = 0
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: torch's writers call it."""

    def digest(self) -> str:
        return self._hash.hexdigest()


def _remove_stale_drafts(folder: Path) -> None:
    """Delete the drafts of processes that were killed; a live writer holds a lock on its draft."""
    for draft in folder.glob(DRAFTS):
        with contextlib.suppress(OSError), draft.open("r+b") as file:  # NFS locks only files open for writing
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoint files: after any damage or disk error an older one is intact and found, and no code is run."""

import errno
import fcntl
import os
import random
import resource
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.checkpoints import content, found_step, sealed
from harness.effort import Effort

from dualdist.checkpoint.disk_task import DiskOutcome, DiskTask
from dualdist.checkpoint.files import (
    EXTRA,
    METADATA,
    SEAL_BYTES,
    FileProgress,
    checkpoints,
    number_of,
    read,
    read_newest,
    real_path,
    write,
)
from dualdist.errors import CheckpointError

RANDOM = random.Random(5)


def save(folder: Path, step: int, keep: int | None = 3, count: int = 1000) -> Path:
    return write(folder, content(step, count), keep, FileProgress())


def test_the_last_checkpoints_are_kept_and_numbers_continue(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert read_newest(folder, FileProgress()) is None
    for step in range(5):
        save(folder, step)
        assert found_step(folder) == step
    (folder / "notes.txt").touch()
    assert sorted(os.listdir(folder)) == [*(f"checkpoint-0000000{n}.pt" for n in (3, 4, 5)), "notes.txt"]
    save(folder, 9, keep=1)
    save(folder, 10, keep=None)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-00000007.pt", "checkpoint-00000006.pt"]
    before = sorted(os.listdir("/proc/self/fd"))
    for step in (11, 12):
        save(folder, step)
    assert sorted(os.listdir("/proc/self/fd")) == before, "no file stays open"


def test_the_loaded_checkpoint_stays_until_newer_ones_replace_it(tmp_path: Path) -> None:
    """Files that are damaged, or that the program went back behind, are no replacement."""
    for step in (1, 2, 3):
        save(tmp_path, step, keep=None)
    for name in ("checkpoint-00000002.pt", "checkpoint-00000003.pt"):
        (tmp_path / name).write_bytes(b"damaged")
    found = read_newest(tmp_path, FileProgress())
    passed_over = {path.resolve() for path in found.newer}
    assert (found.path.name, len(passed_over)) == ("checkpoint-00000001.pt", 2)
    for step, left in ((4, [4, 3, 2, 1]), (5, [5, 4])):
        write(tmp_path, content(step), 2, FileProgress(), passed_over)
        assert [number_of(path) for path in checkpoints(tmp_path)] == left
    back = read_newest(tmp_path / "checkpoint-00000004.pt", FileProgress())
    assert [path.name for path in back.newer] == ["checkpoint-00000005.pt"]


def test_what_is_not_a_regular_file_is_skipped(tmp_path: Path) -> None:
    save(tmp_path, 1)
    os.mkfifo(tmp_path / "checkpoint-00000002.pt")
    (tmp_path / "checkpoint-00000003.pt").mkdir()
    (tmp_path / "checkpoint-00000004.pt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "checkpoint-00000005.pt").symlink_to("/dev/zero")
    (tmp_path / "checkpoint-00000006.pt").symlink_to("checkpoint-00000006.pt")
    found = read_newest(tmp_path, FileProgress())
    assert (number_of(found.path), len(found.refused)) == (1, 5)
    assert [number_of(save(tmp_path, step, keep=1)) for step in (7, 8)] == [7, 8]
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-0000000{number}.pt" for number in (2, 3, 4, 5, 6, 8)]
    assert real_path(tmp_path / "checkpoint-00000006.pt").name == "checkpoint-00000006.pt"


def test_torch_load_and_zipfile_read_it(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    for mmap in (False, True):
        assert torch.load(path, weights_only=True, mmap=mmap)["model"]["weight"].unique().tolist() == [3.0]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    progress = FileProgress()
    path = save(tmp_path, 4, count=100_000)
    read(path, progress)
    assert progress.nbytes == path.stat().st_size, "all bytes count, for the checksum and for torch"


def test_a_file_with_a_flipped_bit_is_refused_by_name(tmp_path: Path, effort: Effort) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    whole = newest.read_bytes()
    ends = [*range(len(whole) - 200, len(whole)), *range(100)]
    for place in (*ends, *RANDOM.choices(range(len(whole)), k=effort(1000, 10_000))):
        altered = bytearray(whole)
        altered[place] ^= 1 << RANDOM.randrange(8)
        newest.write_bytes(altered)
        found = read_newest(tmp_path, FileProgress())
        assert found.content[EXTRA] == {"step": 1}, place
        assert newest.name in found.refused[0]
        effort.count("files with a bit flipped")


def test_a_truncated_or_extended_file_is_refused_by_name(tmp_path: Path, effort: Effort) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    whole = newest.read_bytes()
    ends = [*range(100), *range(len(whole) - 100, len(whole))]
    lengths = [*ends, *RANDOM.choices(range(len(whole)), k=effort(500, 5000))]
    for data in (*(whole[:length] for length in lengths), whole + b"\0", whole + whole):
        newest.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"00000002\.pt (is truncated|has been altered)"):
            read(newest, FileProgress())
        effort.count("files cut short or with more behind")
    assert found_step(tmp_path, refused=1) == 1


@pytest.mark.parametrize(
    "strange", [5, [], {}, {METADATA: 1}, {METADATA: {"format": 2}, EXTRA: {}}, {METADATA: {"format": 1}}]
)
def test_a_file_of_another_program_is_refused(tmp_path: Path, strange: Any) -> None:
    path = tmp_path / "x.pt"
    torch.save(strange, path)
    for words in ("does not end in a checksum", "no checkpoint of this version"):
        with pytest.raises(CheckpointError, match=words):
            read_newest(path, FileProgress())
        path.write_bytes(sealed(path.read_bytes()))


@contextmanager
def disk_of(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_older_one_intact(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    before, size = path.read_bytes(), path.stat().st_size
    for limit in (*range(0, size, 97), *range(size - 90, size)):
        with disk_of(limit), pytest.raises(CheckpointError, match=r"02\.pt: File too large.*00000001\.pt is still"):
            save(tmp_path, 2)
        assert os.listdir(tmp_path) == [path.name], "no draft is left"
    assert path.read_bytes() == before
    with disk_of(size):
        save(tmp_path, 2)
    assert found_step(tmp_path) == 2
    for limit in (1, 1 << 20, (1 << 23) + 5):
        with disk_of(limit), pytest.raises(CheckpointError, match=r"File too large, after .* MB; there is no earlier"):
            save(tmp_path / "large", 2, count=1 << 22)
        assert os.listdir(tmp_path / "large") == []


class Interrupting(FileProgress):
    def __init__(self, nbytes: int, call: Callable[[FileProgress], Any]) -> None:
        self._limit, self._call = nbytes, call

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "nbytes" and value >= self._limit:
            self._limit = 1 << 60
            self._call(self)


def test_an_abandoned_file_never_appears(tmp_path: Path) -> None:
    """Not even if it was abandoned at its last byte."""
    path = save(tmp_path, 1)
    size = path.stat().st_size - SEAL_BYTES
    for nbytes in (*range(1, size, 97), size):
        with pytest.raises(CheckpointError, match=r"00000002\.pt: it was abandoned.*00000001\.pt is still there"):
            write(tmp_path, content(2), 1, Interrupting(nbytes, lambda own: setattr(own, "is_abandoned", True)))
        assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("has_links", [True, False])
def test_no_file_is_overwritten_by_one_of_the_same_number(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    path = write(tmp_path, content(1), None, Interrupting(1, lambda progress: save(tmp_path, 2)))
    assert path.name == "checkpoint-00000002.pt"
    steps = [read(path, FileProgress()).content[EXTRA]["step"] for path in checkpoints(tmp_path)]
    assert steps == [1, 2]
    assert len(os.listdir(tmp_path)) == 2


def refuse(*args: Any) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_an_unusable_folder_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, words in (
        (tmp_path / "file", "it is a file; name a folder"),
        (tmp_path / "no" / "where", f"there is no folder {tmp_path / 'no'}; create it, or mount"),
        (Path("/proc/run"), "cannot save to /proc/run"),
    ):
        with pytest.raises(CheckpointError, match=words):
            save(folder, 1)
    with pytest.raises(CheckpointError, match="file is truncated, or no checkpoint"):
        read_newest(tmp_path / "file", FileProgress())
    with pytest.raises(CheckpointError, match="cannot look for checkpoints"):
        read_newest(tmp_path / "file" / "below", FileProgress())
    with pytest.raises(CheckpointError, match=r"best\.pt: there is no such file"):
        read_newest(tmp_path / "best.pt", FileProgress())
    (tmp_path / "run.pt").mkdir()
    assert read_newest(tmp_path / "run.pt", FileProgress()) is None


def test_drafts_of_killed_processes_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    dead, living = tmp_path / ".checkpoint-00000001.ab.draft", tmp_path / ".checkpoint-00000001.cd.draft"
    dead.touch()
    with living.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == [living.name, "checkpoint-00000001.pt"]


def test_a_stalled_disk_is_an_error_and_a_slow_one_is_not() -> None:
    end, limit_s = threading.Event(), 0.3

    def work(progress: FileProgress, moves: int) -> str:
        for _ in range(moves):
            progress.nbytes += 1
            end.wait(limit_s / 6)
        end.wait()
        return "done"

    task = DiskTask(lambda progress: work(progress, moves=12), limit_s=limit_s)
    beats = 1
    while (outcome := task.outcome()) is None:
        beats += 1
    assert beats > 8, "as long as it moved, which was twice the limit"
    assert outcome == DiskOutcome(error="no byte went to or from the disk for 0.3 s: is it still there?")
    assert task.progress.is_abandoned
    end.set()
    while task.outcome() != DiskOutcome("done"):
        pass


def test_cpu_time_counts_as_progress() -> None:
    """Thousands of small tensors take CPU time and little I/O."""
    limit_s = 2.0  # in which a loaded machine gives the thread 0.1 s of its cores, the least that is noticed

    def work(progress: FileProgress) -> str:
        while time.thread_time() < 1.2 * limit_s:
            pass
        return "done"

    task = DiskTask(work, limit_s=limit_s)
    while (outcome := task.outcome()) is None:
        pass
    assert outcome == DiskOutcome("done")


def test_a_thread_that_cannot_start_or_leaves_by_an_exit_is_an_error_of_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(progress: FileProgress) -> str:
        raise SystemExit("left")

    outcome = DiskTask(leave, limit_s=1.0).outcome()
    assert outcome == DiskOutcome(error="SystemExit: left")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    outcome = DiskTask(lambda progress: "done", limit_s=1.0).outcome()
    assert outcome == DiskOutcome(error="RuntimeError: can't start new thread")

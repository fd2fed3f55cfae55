"""Checkpoints whose writer dies at any byte or line, on a disk that fills up, and in files that anybody altered."""

import contextlib
import io
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from faults.conftest import error_of
from harness.checkpoints import content, found_step, sealed
from harness.effort import Effort
from harness.jobs import Launch

import dualdist as dd
from dualdist.checkpoint import files as checkpoint_files
from dualdist.checkpoint.files import EXTRA, METADATA, FileProgress, read, read_newest, write
from dualdist.errors import CheckpointError

pytestmark = pytest.mark.smoke
DRAWS = random.Random(11)


def in_a_child(work: Callable[[], object]) -> int:
    """Do the work in a forked process; return its exit code, or minus the number of a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at_line(number: int, work: Callable[[], object]) -> None:
    """Do the work up to the n-th line that runs in files.py."""
    lines = iter(range(1, number))

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != checkpoint_files.__file__:
            return None
        if event == "line" and next(lines, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return look

    sys.settrace(look)
    work()


def killed_at_byte(number: int, work: Callable[[], object]) -> None:
    """Do the work until a file has so many bytes: the kernel kills the process that writes more."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
    work()


def test_a_writer_killed_at_any_byte_loses_no_checkpoint(tmp_path: Path, effort: Effort) -> None:
    size = write(tmp_path, content(0), None, FileProgress()).stat().st_size
    times = effort(60, 1500)
    for step in range(1, times + 1):
        before, nbytes = found_step(tmp_path), DRAWS.randrange(size)
        dying = partial(killed_at_byte, nbytes, partial(write, tmp_path, content(step), 2, FileProgress()))
        assert in_a_child(dying) == -signal.SIGXFSZ
        (draft,) = tmp_path.glob(checkpoint_files.DRAFTS)
        assert draft.stat().st_size == nbytes
        assert found_step(tmp_path) == before
        if step % 10 == 0:
            write(tmp_path, content(step), 2, FileProgress())
            assert found_step(tmp_path) == step
            assert not list(tmp_path.glob(checkpoint_files.DRAFTS))
    effort.count("writers killed at a random byte", times)


def test_a_writer_killed_at_any_line_loses_no_checkpoint(tmp_path: Path, effort: Effort) -> None:
    """Between the bytes, the rename and the removal of old files, too."""
    for step in (1, 2, 3):
        write(tmp_path, content(step), None, FileProgress())
    line, step, codes = 0, 3, set()
    while 0 not in codes:
        line += effort(7, 1)
        before = found_step(tmp_path)
        work = partial(write, tmp_path, content(step + 1), 2, FileProgress())
        codes.add(in_a_child(partial(killed_at_line, line, work)))
        now = found_step(tmp_path)
        assert now in (before, step + 1), line
        assert len(list(tmp_path.glob("*.pt"))) >= 2
        step = max(step, now)
        effort.count("writers killed at a line")
    assert codes == {0, -signal.SIGKILL}
    assert line > 100
    assert found_step(tmp_path) == step


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system with little room."""
    disk = folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]).returncode:
        pytest.skip("a file system in memory is mounted by root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fails_leaves_the_last_checkpoint_and_shutdown_raises(tmp_path: Path) -> None:
    """On one rank: a law has that all ranks raise such errors."""
    dd.init()
    with small_disk(tmp_path, "size=1m") as disk:  # room for three checkpoints of 300 kB

        def save(step: int, **options: Any) -> object:
            return dd.save_checkpoint(disk / "run", step=step, weight=torch.zeros(75_000), keep=None, **options)

        for step in (1, 2, 3):
            save(step)
        full = r"00000004\.pt: No space left on device.*checkpoint-00000003\.pt is still there"
        with pytest.raises(CheckpointError, match=full):
            save(4)
        assert (dd.load_checkpoint(disk / "run") or {})["step"] == 3
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            save(5)
        assert (dd.load_checkpoint(disk / "run") or {})["step"] == 3
        save(6, async_op=True)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            dd.shutdown()
        assert not dd.is_initialized()


# The child's folder cannot be made.
ENDS = """
import atexit, os, torch
import dualdist as dd
child = os.fork()
if child:
    atexit.register(os.waitpid, child, 0)
dd.init()
dd.save_checkpoint("run" if child else "no/run", async_op=True, weight=torch.ones(1 << 23))
"""


@pytest.mark.full
def test_a_program_that_ends_finishes_its_last_checkpoint_or_prints_why_not(launch: Launch) -> None:
    outcome = launch([sys.executable, "-c", ENDS])
    found = read_newest(launch.directory / "run", FileProgress())
    assert found is not None
    assert found.content["extra"]["weight"].min() == 1
    assert "dualdist: cannot save to no/run: there is no folder no" in outcome.stderr


class Malicious:
    """Create a folder when unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def archive_with(members: list[tuple[str, bytes]]) -> bytes:
    """Return a valid archive with these members added, or for names with "=" replaced."""
    good = zipfile.ZipFile(io.BytesIO(saved(content(1))))
    top = good.namelist()[0].partition("/")[0]
    given = dict(members)
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")  # of two members of one name
        for name in good.namelist():
            inside = name.partition("/")[2]
            archive.writestr(name, given.get(f"={inside}", good.read(name)))
        for inside, data in members:
            if not inside.startswith("="):
                archive.writestr(f"{top}/{inside}", data)
    return file.getvalue()


def tar_of(pickled: bytes) -> bytes:
    """Return torch's format before 0.1.10: a tar archive of three pickles and the tensors."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("sys_info", "storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(pickled)
            archive.addfile(member, io.BytesIO(pickled))
    return file.getvalue()


def safetensors_of(pickled: bytes) -> bytes:
    """huggingface.co/docs/safetensors: the header's length, the header as JSON, the tensors' bytes."""
    tensor = {"dtype": "U8", "shape": [len(pickled)], "data_offsets": [0, len(pickled)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + pickled


FORGERIES: dict[str, Callable[[Malicious], bytes]] = {
    "pickle": pickle.dumps,
    "archive of torch": lambda evil: saved({"model": evil}),
    "archive of torch, of an older protocol": lambda evil: saved({"model": evil}, pickle_protocol=0),
    "torch before 1.6": lambda evil: saved({"model": evil}, _use_new_zipfile_serialization=False),
    "torch before 0.1.10": lambda evil: tar_of(pickle.dumps(evil)),
    "tar": lambda evil: tar_of(pickle.dumps(evil, protocol=0)),
    "safetensors": lambda evil: safetensors_of(pickle.dumps(evil)),
    "safetensors in an archive": lambda evil: archive_with([("model.safetensors", safetensors_of(pickle.dumps(evil)))]),
    "pickle before an archive": lambda evil: pickle.dumps(evil) + saved(content(1)),
    "pickle behind an archive": lambda evil: saved(content(1)) + pickle.dumps(evil),
    "archive with another pickle": lambda evil: archive_with([("=data.pkl", pickle.dumps(evil))]),
    "archive with a second pickle of that name": lambda evil: archive_with([("data.pkl", pickle.dumps(evil))]),
    "archive with constants": lambda evil: archive_with([("constants.pkl", pickle.dumps(evil))]),
    "archive with a pickled version": lambda evil: archive_with([("=version", pickle.dumps(evil))]),
    "archive with a pickle as a tensor": lambda evil: archive_with([("=data/0", pickle.dumps(evil))]),
    "archive with code": lambda evil: archive_with([("code/__torch__.py", b"import os"), ("model.json", b"{}")]),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_no_code_of_a_file_is_run(tmp_path: Path, kind: str, effort: Effort) -> None:
    """Not even with a checksum that matches. Harmless content may be loaded."""
    trap, path = tmp_path / "trap", tmp_path / "checkpoint-00000001.pt"
    forged = FORGERIES[kind](Malicious(trap))
    for data in (forged, sealed(forged)):
        path.write_bytes(data)
        error = error_of(partial(read, path, FileProgress()), CheckpointError)
        assert "add_safe_globals" not in error, "torch's advice to run it all the same"
        assert path.name in error or set(read(path, FileProgress()).content) == {METADATA, EXTRA, "model"}
        assert not trap.exists()
        effort.count("files with code in them")
    pickle.loads(pickle.dumps(Malicious(trap)))
    assert trap.exists(), "the trap works"


def test_any_file_with_a_matching_checksum_is_read_or_refused(tmp_path: Path, effort: Effort) -> None:
    """Without a crash, a hang or another error; in a child, as torch reads archives in C++."""
    path = tmp_path / "checkpoint-00000001.pt"
    good, times = saved(content(1)), effort(300, 10_000)

    def work() -> None:
        for _ in range(times):
            altered = bytearray(good)
            for _ in range(DRAWS.choice([1, 1, 3, 30])):
                near_the_end = len(altered) - 1 - DRAWS.randrange(900)  # where the archive lists its members
                altered[DRAWS.choice([DRAWS.randrange(len(altered)), near_the_end])] = DRAWS.randrange(256)
            altered = altered[: DRAWS.choice([len(altered)] * 9 + [DRAWS.randrange(len(altered))])]
            path.write_bytes(sealed(altered))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                error_of(partial(read, path, FileProgress()), CheckpointError)

    assert in_a_child(work) == 0
    effort.count("files altered and sealed again", times)

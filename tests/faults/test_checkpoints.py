"""Writers that are killed and disks that fill up: the checkpoint before is intact, found, and every rank is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import checkpoint_rank, checkpoint_writer
from harness.jobs import Launch

from dualdist.checkpoint.files import FileProgress, read_newest

KILLS = 60
DISK = "size=1m"  # three checkpoints, and not four


def test_a_writer_killed_at_any_moment_loses_no_checkpoint(launch: Launch) -> None:
    argv = [sys.executable, checkpoint_writer.__file__, str(launch.directory / "run"), str(KILLS), "1"]
    seen = json.loads(launch(argv).stdout)
    assert seen["kills"] == KILLS
    assert seen["cut_short"] > KILLS / 10, "many are killed in the middle of writing"
    assert seen["steps"] > KILLS / 10, "and it goes on all the same"


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


def test_a_program_that_ends_finishes_its_last_checkpoint_or_says_why_not(launch: Launch) -> None:
    outcome = launch([sys.executable, "-c", ENDS])
    found = read_newest(launch.directory / "run", FileProgress())
    assert found is not None
    assert found.content["extra"]["weight"].min() == 1
    assert "dualdist: cannot save to no/run: there is no folder no" in outcome.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(disk)]).returncode:
        pytest.skip("a file system in memory is mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.smoke
def test_a_disk_that_is_full_or_read_only_is_every_ranks_error(launch: Launch, small_disk: Path) -> None:
    argv = ["torchrun", "--standalone", "--nproc-per-node=2", checkpoint_rank.__file__, str(small_disk / "run")]
    for seen in launch.reports(argv, 2):
        assert "00000004.pt: No space left on device" in seen["full"]
        assert "checkpoint-00000003.pt is still there" in seen["full"]
        assert "Read-only file system" in seen["read-only"]
        assert "Read-only file system" in seen["at shutdown"]
        assert (seen["full found"], seen["read-only found"], seen["is over"]) == (3, 3, True)

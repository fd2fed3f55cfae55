"""Horovod's elastic loop on real ranks: a training that was hurt ends where the one ends that never was."""

from __future__ import annotations

from pathlib import Path

from harness.jobs import Launch

PROGRAM = str(Path(__file__).with_name("elastic_program.py"))
SIZE = 2
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={SIZE}", PROGRAM)


def test_a_training_that_was_hurt_ends_like_one_that_never_was(launch: Launch) -> None:
    """From the commit before, momentum included: to the bit, for two ranks add alike every time."""
    unhurt = launch.reports(TORCHRUN, SIZE)
    hurt = launch.reports([*TORCHRUN, "3", "5"], SIZE)
    for report in (*unhurt, *hurt):
        assert report["parameters"] == unhurt[0]["parameters"]
        assert report["seen"] == [0, 1, 2, 3, 4, 5]
    assert [report["resets"] for report in unhurt] == [[]] * SIZE
    assert [report["resets"] for report in hurt] == [[SIZE, SIZE]] * SIZE

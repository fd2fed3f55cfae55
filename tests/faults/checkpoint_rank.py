"""A rank whose disk fills up, becomes read-only and comes back: python checkpoint_rank.py FOLDER, of a small disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from harness.jobs import report

import dualdist as dd
from dualdist.errors import CheckpointError

WEIGHT = torch.zeros(75_000)  # 300 kB


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "no error"


def remount(disk: Path, how: str) -> None:
    if dd.rank() == 0:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)
    dd.barrier()


def main(folder: Path) -> None:
    dd.init(timeout_s=20)
    mine = folder if dd.rank() == 0 else Path("/proc/nowhere")

    def save(step: int, *, async_op: bool = False) -> object:
        if async_op:
            return dd.save_checkpoint(mine, step=step, weight=WEIGHT, keep=None, async_op=True)
        return dd.save_checkpoint(mine, step=step, weight=WEIGHT, keep=None)

    for step in (1, 2, 3):
        save(step)
    seen = {"full": error_of(lambda: save(4)), "full found": (dd.load_checkpoint(mine) or {})["step"]}
    remount(folder.parent, "ro")
    seen |= {"read-only": error_of(lambda: save(5)), "read-only found": (dd.load_checkpoint(mine) or {})["step"]}
    save(6, async_op=True)
    rank = dd.rank()
    report(rank, seen | {"at shutdown": error_of(dd.shutdown), "is over": not dd.is_initialized()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

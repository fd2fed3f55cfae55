"""A program that saves without end, killed again and again: python checkpoint_writer.py FOLDER KILLS SEED."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

import dualdist as dd
from dualdist.checkpoint.files import DRAFTS, FileProgress, read_newest

COUNT = 1 << 17  # floats, as many as take some milliseconds to write
LIFE_S = 0.04  # at most, of a child that writes


def save_without_end(folder: Path, acknowledge: int) -> NoReturn:
    """Goes on from the newest checkpoint; says of each step that is on the disk that it is."""
    dd.init()
    found = dd.load_checkpoint(folder)
    step = found["step"] if found else 0
    os.write(acknowledge, f"{step}\n".encode())
    while True:
        step += 1
        is_late = step % 2 == 0  # a thread writes it, and the next step waits for that
        dd.save_checkpoint(folder, keep=2, async_op=is_late, step=step, weight=torch.full((COUNT,), float(step)))
        os.write(acknowledge, f"{step - 1 if is_late else step}\n".encode())


def life(folder: Path, seconds: float) -> int:
    """The last step that a child acknowledged, which was killed so long after it had begun to save."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        save_without_end(folder, sender)
    os.close(sender)
    with open(receiver) as said:
        steps = [said.readline()]  # what it has found, before it writes
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return int([*steps, *said.read().split("\n")[:-1]][-1])


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    dd.init()
    dd.save_checkpoint(folder, step=0, weight=torch.zeros(COUNT))  # all is imported before the first child
    dd.shutdown()
    draws = random.Random(seed)
    cut_short, steps = 0, 0
    for _ in range(kills):
        acknowledged = max(life(folder, draws.uniform(0, LIFE_S)), steps)
        drafts = list(folder.glob(DRAFTS))
        cut_short += bool(drafts)
        found = read_newest(folder, FileProgress())
        if found is not None:
            steps = found.content["extra"]["step"]
            assert found.content["extra"]["weight"].unique().tolist() == [steps]
            assert not found.refused, found.refused
        assert acknowledged <= steps, f"step {acknowledged} was saved, {steps} was found"
        assert len(drafts) <= 1, "drafts of the dead are removed"
    print(json.dumps({"kills": kills, "cut_short": cut_short, "steps": steps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

"""Measure the seconds from the kill of a rank to the others' next step: `dualdist run --min-ranks` beside torchrun.

    python tests/recovery_time.py [--kills 9] [--ranks 4]

Both run this program, in which one of the ranks kills itself at a step; torchrun starts all ranks again, which continue
from the newest checkpoint. Takes half a minute a kill, and wants an idle machine.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import dualdist as dd

STEPS, KILLED_AT = 20, 10
WAYS = {
    "dualdist run --min-ranks": [sys.executable, "-m", "dualdist", "run", "-np", "{ranks}", "--min-ranks", "1"],
    "torchrun --max-restarts": ["torchrun", "--standalone", "--nproc-per-node={ranks}", "--max-restarts=1"],
}


def train(folder: Path) -> None:
    torch.set_num_threads(1)
    dd.init(timeout_s=30)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @dd.elastic.run
    def loop(state: dd.elastic.State) -> None:
        while state.step < STEPS:
            if state.step == KILLED_AT and dd.rank() == dd.size() - 1 and not (folder / "killed").exists():
                (folder / "killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(8, 256)).sum().backward()
            optimizer.step()
            state.step += 1
            if dd.rank() == 0 and state.step == KILLED_AT + 1:
                (folder / "continued").write_text(str(time.monotonic()))
            state.commit()

    loop(dd.elastic.State(folder / "run", every=1, model=model, optimizer=optimizer, step=0))
    dd.shutdown()


def measure(way: str, ranks: int) -> float:
    """Return the seconds from the kill to the step after it, on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [word.format(ranks=ranks) for word in WAYS[way]]
        subprocess.run([*argv, __file__, folder], check=True, capture_output=True, timeout=120)
        killed, continued = (float((Path(folder) / name).read_text()) for name in ("killed", "continued"))
    return continued - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.kills):
        for way, seconds in found.items():  # in turn, so that a slow minute meets both
            seconds.append(measure(way, args.ranks))
    for way, seconds in found.items():
        print(f"{way}: median {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})")


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        train(Path(sys.argv[1]))
    else:
        main()

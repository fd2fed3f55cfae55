"""Kills a rank in the middle of a training, which goes on from its last checkpoint.

    dualdist run -np 2 --max-restarts 1 examples/fault_tolerance.py --kill 1:25

At step 25 rank 1 ends itself as `kill -9` would. The launcher ends the other ranks and starts all again; they load the
newest good checkpoint and see the rest of the epoch's images once each, as if nothing had happened. The parameters at
the end are those of a run without --kill, on CPUs bit for bit. Or leave --kill out, and kill a rank yourself.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

import dualdist as dd
from common.data import digits
from common.help import parser
from common.ranks import parameter_hash


@dd.elastic.run  # the state is that of the newest checkpoint when this begins
def train(state: dd.elastic.State, loader: torch.utils.data.DataLoader, options: argparse.Namespace) -> None:
    is_first_start = state.step == 0
    place = f"step {state.step}, at image {state.sampler.position} of epoch {state.sampler.epoch}"
    dd.print(f"{dd.size()} ranks begin with {place}")
    for _ in range(state.sampler.epoch, options.epochs):
        for images, labels in loader:
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(images.to(dd.device())), labels.to(dd.device()))
            loss.backward()
            state.optimizer.step()
            state.step += 1
            state.commit()  # after every step; each --every-th one is saved
            if is_first_start and options.kill == f"{dd.rank()}:{state.step}":
                print(f"rank {dd.rank()} is killed at step {state.step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--checkpoints", default="checkpoints", metavar="DIR", help="where they are kept")
    flags.add_argument("--every", type=int, default=10, metavar="N", help="steps between two checkpoints")
    flags.add_argument("--epochs", type=int, default=2, help="times that all images are seen")
    flags.add_argument(
        "--kill", metavar="RANK:STEP", help="end this rank after this step of a run without a checkpoint"
    )
    options = flags.parse_args()
    dd.init()
    torch.manual_seed(dd.rank())  # each rank has its own dropout; a checkpoint has every rank's random state
    train_set, _ = digits(channels=1)
    layers = nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    model = nn.Sequential(*layers).to(dd.device())
    optimizer = dd.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.003))
    sampler = dd.Sampler(train_set, remainder="drop")
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    state = dd.elastic.State(options.checkpoints, every=options.every, **parts, step=0)
    train(state, dd.loader(train_set, batch_size=16, sampler=sampler), options)
    dd.print(f"done after step {state.step}: every rank has the parameters {parameter_hash(model):.16}")
    dd.shutdown()


if __name__ == "__main__":
    main()

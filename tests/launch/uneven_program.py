"""Two ranks, of which the first has one batch more in each epoch, and which may be preempted."""

from __future__ import annotations

import torch

import dualdist as dd

Seen = tuple[list[tuple[int, int]], bool]

SAMPLES = 11
EPOCHS = 3


def train_twice(folder: str, stop_after: int, batch: int) -> tuple[Seen, Seen]:
    """Told to stop after so many batches of so many samples, of which all are whole; and going on from there."""
    return train(folder, stop_after, batch), train(folder, 0, batch)


def train(folder: str, stop_after: int, batch: int) -> Seen:
    """The epoch and each sample of each step of this rank, and whether it was stopped."""
    torch.set_num_threads(1)
    dd.init("native", timeout_s=20)
    model = torch.nn.Linear(1, 1)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    sampler = dd.Sampler(range(SAMPLES), remainder="uneven", shuffle=False)
    state = dd.elastic.State(folder, model=model, optimizer=optimizer, sampler=sampler)
    seen: list[tuple[int, int]] = []
    steps = 0
    try:
        state.sync()
        while sampler.epoch < EPOCHS:
            for samples in dd.loader(range(SAMPLES), batch, sampler=sampler, drop_last=True):  # type: ignore[arg-type]
                optimizer.zero_grad()
                model(samples[:, None].float()).sum().backward()
                optimizer.step()
                seen += [(sampler.epoch, sample) for sample in samples.tolist()]
                steps += 1
                if steps == stop_after and dd.rank() == 0:
                    dd.elastic.request_stop()
                state.commit()
            dd.broadcast_parameters(model, dd.join())
    except dd.elastic.Stopped:
        return seen, True
    finally:
        dd.shutdown()
    return seen, False

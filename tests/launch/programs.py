"""Functions and programs that the tests of this folder start as ranks."""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from faults.elastic_rank import GLOBAL_BATCH, SAMPLES, SEED, step
from harness.jobs import report
from harness.problem import make_model, make_optimizer
from torch.utils.data import DataLoader, IterableDataset

import dualdist as dd

UNEVEN_SAMPLES, UNEVEN_EPOCHS = 11, 3
Seen = tuple[list[tuple[int, int]], bool]


def identity(extra: str) -> tuple[int, int, str, str, str]:
    dd.init(timeout_s=30)
    found = (dd.rank(), dd.size(), dd.launcher(), dd.backend(), extra)
    dd.shutdown()
    return found


def one_fails(how: str) -> None:
    dd.init(timeout_s=30)
    if dd.rank() == 1:
        if how == "raises":
            raise ValueError("rank 1's own mistake")
        os._exit(7)
    time.sleep(60)


def cannot_be_sent_back() -> Any:
    return lambda: None


class Unsendable(Exception):
    """Cannot be unpickled: made from two values, pickled as one."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first}, {second}")


def raises_what_cannot_be_sent() -> None:
    raise Unsendable(1, 2)


def one_dies_while_others_wait() -> None:
    dd.init(timeout_s=30)
    if dd.rank() == 1:
        os._exit(7)
    dd.barrier()


def beside_an_existing_group(rank: int, size: int, init_method: str) -> None:
    """Use the program's own process group by dualdist, and again after dd.shutdown()."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size)
    dd.init(timeout_s=30)
    names = ("rank", "size", "local_rank", "local_size", "backend", "transport")
    seen = {name: getattr(dd, name)() for name in names}
    seen["sum"] = dd.allreduce(torch.tensor(float(rank + 1)), "sum").item()
    dd.shutdown()
    still = torch.ones(1)
    dist.all_reduce(still)
    dist.destroy_process_group()
    report(rank, seen | {"still": still.item()})


def train_twice(folder: str, stop_after: int, batch: int) -> tuple[Seen, Seen]:
    """Request a stop after so many batches of so many samples, of which all are whole; then go on from there."""
    return train_unevenly(folder, stop_after, batch), train_unevenly(folder, 0, batch)


def train_unevenly(folder: str, stop_after: int, batch: int) -> Seen:
    """Return the epoch and each sample of each step of this rank, and whether it was stopped."""
    torch.set_num_threads(1)
    dd.init("native", timeout_s=20)
    model = torch.nn.Linear(1, 1)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    sampler = dd.Sampler(range(UNEVEN_SAMPLES), remainder="uneven", shuffle=False)
    state = dd.elastic.State(folder, model=model, optimizer=optimizer, sampler=sampler)
    seen: list[tuple[int, int]] = []
    steps = 0
    try:
        state.sync()
        while sampler.epoch < UNEVEN_EPOCHS:
            for samples in dd.loader(range(UNEVEN_SAMPLES), batch, sampler=sampler, drop_last=True):  # type: ignore[arg-type]
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


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def train_on(folder: str, steps: int, workers: int) -> dict[str, Any]:
    """Train one epoch from the newest checkpoint; stop and save after `steps` steps."""
    torch.set_num_threads(1)
    dd.init(timeout_s=40)
    model = make_model()
    optimizer = dd.wrap_optimizer(make_optimizer(model))
    sampler = dd.Sampler(range(SAMPLES), remainder="uneven", seed=SEED)
    stream = dd.Sampler(Stream(), remainder="uneven", shuffle=False)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler, "stream": stream}
    mine = folder if dd.rank() == 0 else "/proc/nowhere"
    found = dd.load_checkpoint(mine, **parts)
    seen: list[tuple[list[int], list[int]]] = []
    batch = GLOBAL_BATCH // dd.size()
    loaders: list[DataLoader[Any]] = [
        dd.loader(range(SAMPLES), batch, sampler=sampler, num_workers=workers),  # type: ignore[arg-type]
        dd.loader(Stream(), batch, sampler=stream, num_workers=workers),
    ]
    for samples, numbers in zip(*loaders, strict=True):
        step(model, optimizer, samples)
        seen.append((samples.tolist(), numbers.tolist()))
        if len(seen) == steps:
            dd.save_checkpoint(mine, **parts, backend=dd.backend())
            break
    epochs = sampler.epoch, stream.epoch
    dd.shutdown()
    return {"seen": seen, "parameters": list(model.parameters()), "found": found, "epochs": epochs}


if __name__ == "__main__":
    rank, size, init_method = sys.argv[1:]
    beside_an_existing_group(int(rank), int(size), init_method)

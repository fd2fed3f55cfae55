"""Collectives over MPI compared with exact sums, in unusual cases: python mpi_program.py pieces|one-thread."""

import sys
import time
from typing import Any

import mpi4py
import torch
from harness.jobs import report

import dualdist as dd
from dualdist.backends.mpi import backend

TIMEOUT_S = 40


def before(case: str) -> None:
    if case == "pieces":
        backend.MAX_COUNT = 1001  # bytes in one call, as if tensors were larger than MPI can count
    else:
        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI

        assert MPI.Query_thread() == MPI.THREAD_SERIALIZED


def check(count: int) -> None:
    rank, size = dd.rank(), dd.size()
    numbers = torch.arange(count)
    assert torch.equal(dd.allreduce(numbers + rank, "sum"), numbers * size + sum(range(size)))
    assert torch.equal(dd.broadcast(numbers + rank, root=size - 1), numbers + size - 1)
    assert torch.equal(dd.allgather(numbers + rank), torch.cat([numbers + other for other in range(size)]))
    rows = torch.arange(size * count) + rank
    expected = torch.cat([numbers + rank * count + other for other in range(size)])
    assert torch.equal(dd.alltoall(rows), expected)
    begun = [dd.allreduce(numbers + rank, "sum", name=str(number), async_op=True) for number in range(3)]
    assert all(torch.equal(each.wait(), numbers * size + sum(range(size))) for each in begun)


class Meet(torch.autograd.Function):
    """A collective within backward(), as SyncBatchNorm has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return dd.allreduce(grad, "sum")


def meet_with_a_bucket_full_on_one_rank() -> None:
    """The last rank waits in a backward's collective before its bucket is full, the others after: it must not block."""
    first, large, last = (torch.nn.Parameter(torch.ones(count)) for count in (3, 1 << 20, 3))
    dd.wrap_optimizer(torch.optim.SGD([first, large, last], lr=1.0))
    loss = Meet.apply(first).sum() + large.sum()
    if dd.rank() < dd.size() - 1:
        loss = loss + last.sum()
    began = time.monotonic()
    loss.backward()
    assert time.monotonic() - began < TIMEOUT_S / 2, "held up until the time limit"
    assert first.grad is not None
    assert first.grad.tolist() == [dd.size()] * 3


def main(case: str) -> None:
    before(case)
    for _ in range(2):
        dd.init("mpi", timeout_s=TIMEOUT_S)
        meet_with_a_bucket_full_on_one_rank()  # first: once there are several optimizers, no bucket leaves early
        for count in (0, 1, 3, 1000, 100_000):
            check(count)
        weight = torch.nn.Parameter(torch.ones(100_000))
        optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
        (weight * dd.rank()).sum().backward()
        optimizer.step()
        assert torch.equal(weight.detach(), torch.full((100_000,), 1 - (dd.size() - 1) / 2))
        group = dd.new_group([dd.size() - 1])
        if group.is_member:
            assert dd.allreduce(torch.ones(2, dtype=torch.bfloat16), "sum", group=group).tolist() == [1, 1]
        rank = dd.rank()
        dd.shutdown()
    report(rank, {"passed": True})


if __name__ == "__main__":
    main(sys.argv[1])

"""One rank and its GPU: python gpu_program.py streams|capture."""

import sys
from typing import Any

import torch
from contract.oracle import raises
from torch import nn

import dualdist as dd
from dualdist.errors import UnsupportedError

CYCLES = 500_000_000  # a quarter of a second and more


class Late(torch.autograd.Function):
    """The identity, whose gradient is computed after a long wait of the stream."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return grad * 2


def streams() -> None:
    """A bucket leaves before backward ends, and holds what another stream has still to compute."""
    side = torch.cuda.Stream()
    first, late, last = (nn.Parameter(torch.ones(1 << 20, device="cuda")) for _ in range(3))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([first, last, late], lr=0.1), bucket_cap_mb=8, first_bucket_mb=8)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            mine = Late.apply(late).sum()
        torch.cuda.default_stream().wait_stream(side)
        (first.sum() + last.sum() + mine).backward()
        for param, expected in ((first, 1.0), (last, 1.0), (late, 2.0)):
            assert param.grad is not None
            assert param.grad.unique().tolist() == [expected]
        optimizer.step()


def capture() -> None:
    """A graph that would replay without the other ranks is refused."""
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    weight.sum().backward()
    weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        raises(UnsupportedError, lambda: weight.sum().backward(), "CUDA graph")


dd.init()
{"streams": streams, "capture": capture}[sys.argv[1]]()
dd.shutdown()
print(sys.argv[1], "holds")

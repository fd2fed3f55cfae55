"""Gradients that travel together: which ones, and the flat buffer that carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from dualdist.backends.base import Backend, Work
from dualdist.collectives import divide_

GradientOp = Literal["mean", "sum"]

# A small first bucket starts the first transfer early; the size of the others is DDP's.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


def plan_buckets(params: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Which of the numbered parameters travel together, last ones first: autograd finishes the last layers first.

    A bucket holds one device and one dtype, and is closed by the parameter that fills it.
    """
    buckets: list[tuple[int, ...]] = []
    open_members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    open_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    limit = FIRST_BUCKET_BYTES
    for number in reversed(numbers):
        kind = (params[number].device, params[number].dtype)
        open_members.setdefault(kind, []).append(number)
        open_bytes[kind] = open_bytes.get(kind, 0) + params[number].nbytes
        if open_bytes[kind] >= limit:
            buckets.append(tuple(open_members.pop(kind)))
            del open_bytes[kind]
            limit = BUCKET_BYTES
    return buckets + [tuple(members) for members in open_members.values()]


class Bucket:
    """A flat buffer with a place for each member's gradient, and behind them a flag for each: "I had a gradient"."""

    def __init__(self, params: Sequence[torch.Tensor], name: str) -> None:
        self.params = params
        self.name = name
        first = params[0]
        counts = [param.numel() for param in params]
        self.flat = torch.zeros(sum(counts) + len(params), dtype=first.dtype, device=first.device)
        pieces = self.flat[: sum(counts)].split(counts)
        self.views = [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]
        self.flags = self.flat[sum(counts) :]
        self.waiting_for = len(params)
        self.work: Work | None = None

    @torch.no_grad()
    def launch(self, backend: Backend) -> None:
        """Copy the gradients in and send them off."""
        grads = [param.grad for param in self.params]
        present = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if len(present) < len(grads):
            self.flat.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        self.flags.copy_(torch.tensor([float(grad is not None) for grad in grads]))
        self.work = backend.allreduce_(self.flat, "sum", self.name)

    def wait(self) -> None:
        """What was sent has been reduced, and lies in the buffer."""
        assert self.work is not None, "a bucket is waited for after it was launched"
        self.work.wait()
        self.work = None

    @torch.no_grad()
    def put_back(self, size: int, op: GradientOp) -> None:
        """Give the parameters what was reduced; one that no rank used keeps None."""
        used = [True] * len(self.params)
        if any(param.grad is None for param in self.params):
            used = (self.flags.abs() > 0).tolist()
        if op == "mean":
            divide_(self.flat, size)
        targets, sources = [], []
        for param, view, was_used in zip(self.params, self.views, used, strict=True):
            if not was_used:
                continue
            if param.grad is None:
                param.grad = torch.empty_like(param)
            targets.append(param.grad)
            sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

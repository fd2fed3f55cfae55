"""Gradients that travel together: which ones, and the flat buffer that carries them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dualdist.backends.base import Backend, Work
from dualdist.compression import Cast, Compressor
from dualdist.reductions import allreduce_, divide_

GradientOp = Literal["mean", "sum", "adasum"]

# A small first bucket starts the first transfer early; the size of the others is DDP's.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Recipe:
    """What happens to gradients on their way; the same on every rank.

    `predivide` divides before the sum and multiplies after it, where a sum could overflow. With `dense`, sparse
    gradients travel as dense ones.
    """

    op: GradientOp = "mean"
    compressor: Compressor | None = None
    predivide: float = 1.0
    dense: bool = False

    @property
    def words(self) -> str:
        """For the comparison between ranks."""
        wire = self.compressor and (
            self.compressor.dtype if isinstance(self.compressor, Cast) else _name_of(self.compressor)
        )
        return f"op={self.op} compression={wire} predivide={self.predivide} sparse_as_dense={self.dense}"


def _name_of(compressor: Compressor) -> str:
    kind = compressor if isinstance(compressor, type) else type(compressor)
    return kind.__name__


def plan_buckets(
    params: Sequence[torch.Tensor], numbers: Sequence[int], groups: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Which of the numbered parameters travel together, last ones first: autograd finishes the last layers first.

    A bucket holds one device and one dtype, and is closed by the parameter that fills it. Of the given groups, each
    travels in buckets of its own, one for each device and dtype.
    """
    buckets: list[tuple[int, ...]] = []
    grouped = {number for group in groups for number in group}
    for group in groups:
        buckets += _split(params, [number for number in numbers if number in set(group)], None)
    return buckets + _split(params, [number for number in numbers if number not in grouped], FIRST_BUCKET_BYTES)


def _split(params: Sequence[torch.Tensor], numbers: Sequence[int], limit: int | None) -> list[tuple[int, ...]]:
    buckets: list[tuple[int, ...]] = []
    open_members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    open_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    for number in reversed(numbers):
        kind = (params[number].device, params[number].dtype)
        open_members.setdefault(kind, []).append(number)
        open_bytes[kind] = open_bytes.get(kind, 0) + params[number].nbytes
        if limit is not None and open_bytes[kind] >= limit:
            buckets.append(tuple(open_members.pop(kind)))
            del open_bytes[kind]
            limit = BUCKET_BYTES
    return buckets + [tuple(members) for members in open_members.values()]


class Bucket:
    """A flat buffer with a place for each member's gradient, and behind them what the ranks tell each other.

    Those are two flags for each member, "I had a gradient" and "it was sparse", and one for the bucket: "I take part".
    The members `apart` have no place: their sparse gradients travel by themselves.
    """

    def __init__(self, params: Sequence[torch.Tensor], name: str, apart: frozenset[int] = frozenset()) -> None:
        self.params = params
        self.name = name
        self.apart = apart
        first = params[0]
        counts = [0 if number in apart else param.numel() for number, param in enumerate(params)]
        self.flat = torch.zeros(sum(counts) + 2 * len(params) + 1, dtype=first.dtype, device=first.device)
        self._gradients = self.flat[: sum(counts)]
        self._tail = self.flat[sum(counts) :]
        self._pieces = self._gradients.split(counts)
        self.views = [
            piece if number in apart else piece.view(param.shape)
            for number, (piece, param) in enumerate(zip(self._pieces, params, strict=True))
        ]
        self.waiting_for = len(params)
        self._work: Work | None = None
        self._wire = self.flat
        self._contexts: list[Any] = []

    @torch.no_grad()
    def launch(self, line: Backend, recipe: Recipe, *, takes_part: bool = True) -> None:
        """Copy the gradients in and send them off; zeros and no flag where this rank has joined."""
        grads = [param.grad if takes_part else None for param in self.params]
        sparse = [grad is not None and grad.is_sparse for grad in grads]
        present = [
            (view, grad.to_dense() if grad.is_sparse else grad)
            for number, (view, grad) in enumerate(zip(self.views, grads, strict=True))
            if grad is not None and number not in self.apart and (recipe.dense or not grad.is_sparse)
        ]
        if len(present) < len(grads):
            self.flat.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        if recipe.predivide != 1.0:
            self._gradients.div_(recipe.predivide)
        flags = [float(grad is not None) for grad in grads] + [float(flag) for flag in sparse] + [float(takes_part)]
        self._tail.copy_(torch.tensor(flags))
        self._wire = self._compressed(recipe.compressor)
        self._work = allreduce_(line, self._wire, "sum", self.name)

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._work is None or self._work.done()

    def wait(self) -> None:
        """What was sent has been reduced, and lies in the buffer."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def ranks_taking_part(self) -> int:
        """How many ranks have not joined, after wait()."""
        return round(float(self._wire[-1].real if self._wire.is_complex() else self._wire[-1]))

    @torch.no_grad()
    def put_back(self, size: int, recipe: Recipe) -> list[int]:
        """Give the parameters what was reduced; one that no rank used keeps None. Returns the members to do apart."""
        self._decompress(size, recipe)
        count = len(self.params)
        used, sparse = [True] * count, [False] * count
        if any(param.grad is None or param.grad.is_sparse for param in self.params):
            told = (self._tail.abs() > 0).tolist()
            used, sparse = told[:count], told[count : 2 * count]
        targets, sources, apart = [], [], []
        for number, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            if not used[number]:
                continue
            if sparse[number]:
                if recipe.dense:
                    param.grad = view.to_sparse(_sparse_dim(param))
                else:
                    apart.append(number)
                continue
            if param.grad is None:
                param.grad = torch.empty_like(param)
            targets.append(param.grad)
            sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        return apart

    def _compressed(self, compressor: Compressor | None) -> torch.Tensor:
        """What goes over the wire: the buffer itself, or a smaller one."""
        if compressor is None:
            return self.flat
        if isinstance(compressor, Cast):
            return compressor.compress(self.flat)[0]
        members = [view for number, view in enumerate(self.views) if number not in self.apart]
        pairs = [compressor.compress(view) for view in members]
        sent = [tensor for tensor, _ in pairs]
        self._contexts = [ctx for _, ctx in pairs]
        self._shapes = [tensor.shape for tensor in sent]
        return torch.cat([*(tensor.reshape(-1) for tensor in sent), self._tail.to(sent[0].dtype if sent else None)])

    def _decompress(self, size: int, recipe: Recipe) -> None:
        """The reduced gradients, divided where they shall be a mean, lie in their places."""
        if recipe.compressor is not None and not isinstance(recipe.compressor, Cast):
            self._decompress_each(size, recipe, recipe.compressor)
            return
        if self._wire is not self.flat:
            self.flat.copy_(self._wire)
        if recipe.op == "mean":
            divide_(self._gradients, size)
        if recipe.predivide != 1.0:
            self._gradients.mul_(recipe.predivide)

    def _decompress_each(self, size: int, recipe: Recipe, compressor: Compressor) -> None:
        sums, tail = self._wire.tensor_split([self._wire.numel() - self._tail.numel()])
        self._tail.copy_(tail)
        if recipe.op == "mean":
            divide_(sums, size)
        members = [view for number, view in enumerate(self.views) if number not in self.apart]
        pieces = sums.split([shape.numel() for shape in self._shapes])
        for view, piece, shape, ctx in zip(members, pieces, self._shapes, self._contexts, strict=True):
            view.copy_(compressor.decompress(piece.view(shape), ctx))
        if recipe.predivide != 1.0:
            self._gradients.mul_(recipe.predivide)


def _sparse_dim(param: torch.Tensor) -> int:
    """How many dimensions of a sparse gradient are indices: an embedding's is 1, the row."""
    return param.grad.sparse_dim() if param.grad is not None and param.grad.is_sparse else 1

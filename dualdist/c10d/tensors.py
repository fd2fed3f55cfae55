"""Tensors of torch.distributed's calls: refused, made contiguous for a transport, and filled with its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dualdist.backends.control_plane import as_bytes
from dualdist.backends.operation import Completed, Converted, Operation
from dualdist.errors import UnsupportedError

Tensors = list[torch.Tensor]
WAIT = "trigger_wait"  # a method that AsyncCollectiveTensor alone has


def stored(work: Operation[torch.Tensor], targets: Sequence[torch.Tensor]) -> Operation[torch.Tensor]:
    """Return work whose wait() copies the bytes of the result to these tensors, one after the other."""

    def store_all(result: torch.Tensor) -> torch.Tensor:
        parts = as_bytes(result).split([target.nbytes for target in targets]) if targets else ()
        for target, part in zip(targets, parts, strict=True):
            store(target, part)
        return result

    return Converted(work, store_all)


def store(target: torch.Tensor, data: torch.Tensor) -> None:
    """Copy bytes into a tensor, which may be part of a graph, or made in inference mode."""
    with torch.inference_mode(target.is_inference()):
        into = own(target).detach()
        if into.is_contiguous():
            as_bytes(into).copy_(data)
        else:
            into.copy_(data.clone().view(into.dtype).view(into.shape))


def in_place(tensor: torch.Tensor, begin: Callable[[torch.Tensor], Operation[torch.Tensor]]) -> Operation[torch.Tensor]:
    """Begin an operation on the tensor, or on a contiguous copy of which the result is copied back."""
    values = plain(tensor)
    work = begin(values) if values.numel() else Completed(values)
    return work if values.data_ptr() == tensor.data_ptr() else stored(work, [tensor])


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or, in place of a functional collective's, its result."""
    return getattr(tensor, WAIT)() if hasattr(tensor, WAIT) else tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same values, without autograd; a copy only where needed."""
    if tensor.layout != torch.strided:
        raise UnsupportedError("of sparse tensors dualdist has all_reduce() only: pass to_dense()")
    return own(tensor).detach().resolve_conj().resolve_neg().contiguous()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor).clone()


def flattened(given: list[Any]) -> Tensors:
    """Return the tensors of a list of tensors, or of lists of them."""
    return [tensor for each in given for tensor in ([each] if isinstance(each, torch.Tensor) else each)]


def check(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors; UnsupportedError unless they are on the CPU, each in memory of its own.

    Waits for those that functional collectives returned, as no operation may wait for another one when it begins.
    """
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            if not hasattr(tensor, WAIT):
                kind = type(tensor).__name__
                raise UnsupportedError(f"{kind} is made of other tensors: pass those, as to_local() of a DTensor")
            own(tensor)
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"the backend dualdist moves CPU tensors, not {tensor.device.type}: for GPUs set the group up with "
                "the library that torch has for them, or use dd.init()"
            )
    return tensors

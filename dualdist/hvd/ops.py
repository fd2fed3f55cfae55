"""Horovod's numbers of operations, and what they stand for here."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from dualdist.collectives.reductions import INTEGERS, Op
from dualdist.errors import UsageError
from dualdist.hvd.process_sets import ProcessSet

Average, Sum, Adasum, Min, Max, Product = range(6)
OPS: dict[int, Op] = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}

Tensors = Sequence[torch.Tensor]


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The operation that is meant by `op`, or by the older `average`; ValueError where both are given."""
    if op is not None and average is not None:
        raise UsageError("op and average were given: leave average out, op says it all")
    if average is not None:
        warnings.warn("average=... is Horovod's older way; pass op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else op


def reduction_of(
    op: int, tensors: Tensors, prescale: float, postscale: float, process_set: ProcessSet
) -> tuple[Op, float, float]:
    """dualdist's operation and scales. Integers are averaged too: the sum, divided in float64 and cut off."""
    if op not in OPS:
        raise UsageError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
    if op == Adasum:
        members = process_set.size() or 1
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum works on all ranks, not on other process sets")
        if members & (members - 1):
            raise NotImplementedError(f"Adasum pairs the ranks: their number is a power of two, not {members}")
    kinds = {tensor.dtype in INTEGERS for tensor in tensors}
    if op == Average and True in kinds:
        if len(kinds) > 1:
            raise UsageError("integers and floats are averaged in different ways: reduce them in two calls")
        return "integer mean", prescale, postscale
    return OPS[op], prescale, postscale

"""Fast path for blocking CPU allreduce, cached by (op, dtype, shape).

Note [inline payload]: before a reduction moves data, the ranks exchange requests (Note [agreement]). A small tensor
travels with the request, to which a zero byte is appended, which JSON never contains: once all requests agree, every
rank has the values of all ranks and reduces them locally. A rank that takes the general path appends nothing, and then
all ranks take the general path.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dualdist.backends.arithmetic import WIDER, Op, ReduceOp, check_op, wire_op
from dualdist.backends.base import Message
from dualdist.backends.control_plane import PAYLOAD_BYTES, exchange
from dualdist.collectives import collectives
from dualdist.collectives.arguments import Reduction, as_tensor, check_reduction, name_of
from dualdist.collectives.group import EXCHANGE, Group
from dualdist.collectives.handle import Collective, Handle
from dualdist.collectives.negotiation import ENCODE, PAYLOAD_MARK, CollectiveRequest, RankRequests
from dualdist.collectives.reductions import allreduce_
from dualdist.collectives.tensor_utils import PLAIN_TYPES, is_transformed, spec
from dualdist.engine.channel import SLICE_S, Channel
from dualdist.errors import UsageError

KIND = "allreduce"
FAST_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64))
FAST_OPS = ("mean", "sum", "min", "max", "product")
ANY_NAME = "?"
NEW_TUPLE = tuple.__new__  # what the constructor of a NamedTuple calls, without a function in Python


def allreduce(
    group: Group,
    tensor: torch.Tensor,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    reduction: Reduction | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """Return the result of collectives.allreduce(); tensors that need a gradient, GPUs and so on take that path."""
    if (
        type(tensor) in PLAIN_TYPES
        and prescale == 1.0 == postscale
        and (in_place or not (tensor.requires_grad and torch.is_grad_enabled()))
        and tensor.dtype in FAST_DTYPES
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not is_transformed(tensor)
        and tensor.numel() > 0
        and type(op) is str
        and (name is None or type(name) is str)
        and (reduction is None or type(reduction) is str)
        and op in FAST_OPS
        and (known := signature(op, tensor.dtype, tensor.shape, reduction or group.reduction)) is not None
    ):
        if name is None:
            group.num_unnamed += 1
            name = f"{KIND}.{group.num_unnamed}"
            encoded = f'"{name}"'
        else:
            name = name_of(group, KIND, name)
            encoded = ENCODE(name)
        request = f"{known.before_name}{encoded}{known.after_name}".encode() + PAYLOAD_MARK
        call = NEW_TUPLE(FastAllreduce, (group, tensor, op, name, known, request, in_place))
        found = group.run_blocking(call)
        if isinstance(found, Handle):
            result = found.wait()
            return tensor if in_place else result
        if found is not None:
            return found
    scales = prescale, postscale
    return collectives.allreduce(
        group, as_tensor(tensor), op, name, *scales, reduction=reduction, in_place=in_place
    ).run()


@dataclass(frozen=True)
class AllreduceSignature:
    """The part of an allreduce that all calls with the same op, dtype and shape share."""

    shared_args: dict[str, Any]
    before_name: str  # the message up to the name, which alone varies between such calls
    after_name: str
    op: ReduceOp
    inline_bytes: float  # the size of the tensor; infinite if it never travels with the request
    is_ordered: bool  # Note [rank order]; inline payloads are reduced in rank order in any case


@functools.lru_cache(maxsize=4096)
def signature(op: Op, dtype: torch.dtype, shape: torch.Size, reduction: Reduction) -> AllreduceSignature | None:
    """Return what such calls share, or None if numbers of this dtype cannot be reduced in this way."""
    try:
        check_op(op, dtype)
        check_reduction(reduction, op)
    except UsageError:
        return None
    shared_args = collectives.reduction_args([spec(dtype, shape)], "cpu", op, reduction=reduction)
    message = RankRequests((CollectiveRequest(KIND, ANY_NAME, shared_args),)).dumps().decode()
    before_name, _, after_name = message.partition(ENCODE(ANY_NAME))
    is_rounded_once = reduction == "ordered" and dtype in WIDER  # after the division of a mean
    inline_bytes = math.inf if is_rounded_once else shape.numel() * dtype.itemsize
    reduced_by: ReduceOp = "mean" if op == "mean" else wire_op(op)
    return AllreduceSignature(shared_args, before_name, after_name, reduced_by, inline_bytes, reduction == "ordered")


class FastAllreduce(NamedTuple):
    """One call that takes the fast path."""

    group: Group
    tensor: torch.Tensor
    op: Op
    name: str
    signature: AllreduceSignature
    request: bytes  # the message, which all ranks must send alike
    in_place: bool

    def __str__(self) -> str:
        return f"{self._request}"

    @property
    def _request(self) -> CollectiveRequest:
        return CollectiveRequest(KIND, self.name, self.signature.shared_args)

    def collective(self) -> Collective[torch.Tensor]:
        """Return the same call for the general path."""
        scales = 1.0, 1.0
        return collectives.allreduce(
            self.group,
            self.tensor.detach(),
            self.op,
            self.name,
            *scales,
            reduction="ordered" if self.signature.is_ordered else "unordered",
            in_place=self.in_place,
        )

    def perform(self, channel: Channel) -> torch.Tensor | Message:
        """Return the reduction, or the ranks' requests if they are not all the same."""
        known, tensor, backend = self.signature, self.tensor, channel.backend
        messenger = backend.messenger
        is_inline = known.inline_bytes <= (PAYLOAD_BYTES if messenger is None else messenger.payload_bytes)
        payload = tensor if is_inline else None
        message = (
            exchange(backend, self.request, EXCHANGE, payload)
            if messenger is None
            else messenger.message(self.request, payload)
        )
        if not message.advance(SLICE_S):
            channel.finish(message)
        if not message.is_equal:
            return message
        if is_inline:
            return message.reduce_payloads(tensor, known.op, in_place=self.in_place)
        values = tensor.detach()
        output = values if self.in_place else torch.empty_like(values)
        source = None if self.in_place else values
        name = f"op.{self.name}.0"
        operation = allreduce_(backend, output, known.op, name, source=source, is_ordered=known.is_ordered)
        if not operation.advance(SLICE_S):
            channel.finish(operation)
        return tensor if self.in_place else output

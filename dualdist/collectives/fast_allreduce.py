"""Fast path for blocking CPU allreduce, cached by (op, dtype, shape).

Note [inline payload]: before a reduction moves data, the ranks exchange requests (Note [agreement]). A small tensor is
appended to the request, after a zero byte, which JSON never contains: once all requests agree, every rank has the
values of all ranks and reduces them locally. A rank that takes the general path appends nothing, and then all ranks
take the general path.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dualdist.backends.base import Backend, ReduceOp
from dualdist.collectives import collectives, reductions
from dualdist.collectives.arguments import as_tensor, name_of
from dualdist.collectives.negotiation import ENCODE, PAYLOAD_MARK, CollectiveRequest, RankRequests
from dualdist.collectives.reductions import LOCAL_OPS, Op, check_op, divide_, wire_op
from dualdist.collectives.tensor_utils import spec
from dualdist.collectives.work import Collective, Handle

if TYPE_CHECKING:
    from dualdist.collectives.group import Group

KIND = "allreduce"
# Largest payload; with the request it fits the first fragment of every kind of exchange.
INLINE_BYTES = 128
# Dtypes that NumPy has, and in which torch computes without conversion.
FAST_DTYPES = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))
FAST_OPS = ("mean", "sum", "min", "max", "product")
ANY_NAME = "?"


def allreduce(
    group: Group,
    tensor: torch.Tensor,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    """Return the result of collectives.allreduce(); tensors that need a gradient, GPUs and so on take that path."""
    if (
        isinstance(tensor, torch.Tensor)
        and prescale == 1.0 == postscale
        and (in_place or not (tensor.requires_grad and torch.is_grad_enabled()))
        and tensor.dtype in FAST_DTYPES
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.numel() > 0
        and type(op) is str
        and op in FAST_OPS
    ):
        known = signature(op, tensor.dtype, tensor.shape)
        if name is None:
            group.num_unnamed += 1
            name = f"{KIND}.{group.num_unnamed}"
        else:
            name = name_of(group, KIND, name)
        agreed = f"{known.before_name}{ENCODE(name)}{known.after_name}".encode() + PAYLOAD_MARK
        message = agreed + tensor.detach().numpy().tobytes() if known.is_inline else agreed
        found = group.run_blocking(FastAllreduce(group, tensor, op, name, known, agreed, message, in_place))
        if found is not None:
            return found.wait() if isinstance(found, Handle) else found
    return collectives.allreduce(group, as_tensor(tensor), op, name, prescale, postscale, in_place=in_place).run()


@dataclass(frozen=True)
class AllreduceSignature:
    """The part of an allreduce that all calls with the same op, dtype and shape share."""

    shared_args: dict[str, Any]
    before_name: str  # of the message, whose other variable part is the name
    after_name: str
    wire_op: ReduceOp
    is_exact: bool  # no transport treats it in another way: Note [NaN]
    is_inline: bool


@functools.lru_cache(maxsize=4096)
def signature(op: Op, dtype: torch.dtype, shape: torch.Size) -> AllreduceSignature:
    """Return what such calls share; raise UsageError if numbers of this dtype cannot be reduced by `op`."""
    check_op(op, dtype)
    shared_args = collectives.reduction_args([spec(dtype, shape)], "cpu", op)
    message = RankRequests((CollectiveRequest(KIND, ANY_NAME, shared_args),)).dumps().decode()
    before_name, _, after_name = message.partition(ENCODE(ANY_NAME))
    is_inline = shape.numel() * dtype.itemsize <= INLINE_BYTES
    is_exact = not (dtype.is_floating_point and op in ("min", "max"))
    return AllreduceSignature(shared_args, before_name, after_name, wire_op(op), is_exact, is_inline)


class FastAllreduce(NamedTuple):
    """One call that takes the fast path: its message to the other ranks, with an inline payload if it is small."""

    group: Group
    tensor: torch.Tensor
    op: Op
    name: str
    signature: AllreduceSignature
    agreed: bytes  # the part of the message that must be the same on all ranks
    message: bytes
    in_place: bool

    def __str__(self) -> str:
        return f"{self._request}"

    @property
    def _request(self) -> CollectiveRequest:
        return CollectiveRequest(KIND, self.name, self.signature.shared_args)

    def collective(self) -> Collective[torch.Tensor]:
        """Return the same call for the general path."""
        return Collective(self.group, self._request, lambda backend, _: self.perform(backend), self.tensor.device)

    def perform(self, backend: Backend, inline_payloads: Sequence[bytes] = ()) -> torch.Tensor:
        """Return the reduction, of the payloads that came with the requests if there are any, else by the backend."""
        tensor, known = self.tensor.detach(), self.signature
        if inline_payloads and known.is_inline:
            rows = torch.frombuffer(bytearray(b"".join(inline_payloads)), dtype=tensor.dtype)
            reduce = LOCAL_OPS[known.wire_op]
            result, *rest = rows.view(-1, *tensor.shape).unbind()
            for row in rest:
                result = reduce(result, row)
        else:
            result = tensor if self.in_place else tensor.clone()
            flat, name = result.view(-1), f"op.{self.name}.0"
            if known.is_exact and tensor.dtype in backend.supported_reduce_dtypes:
                backend.allreduce_(flat, known.wire_op, name).wait()
            else:
                reductions.allreduce_(backend, flat, known.wire_op, name).wait()
        if self.op == "mean":
            divide_(result, backend.size)
        if not self.in_place:
            return result
        if result is not tensor:
            tensor.copy_(result)
        return self.tensor

"""Fast path for blocking CPU allreduce, cached by (op, dtype, shape).

Note [inline payload]: before a reduction moves data, the ranks exchange requests (Note [agreement]). A small tensor
travels with the request, to which a zero byte is appended, which JSON never contains: once all requests agree, every
rank has the values of all ranks and reduces them locally. A rank that takes the general path appends nothing, and then
all ranks take the general path.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dualdist.backends.base import Backend, ReduceOp
from dualdist.backends.control_plane import ControlAllgather
from dualdist.backends.shm.channel import PAYLOAD_BYTES, HostRanks, ShmMessage
from dualdist.collectives import collectives, reductions
from dualdist.collectives.arguments import Reduction, as_tensor, check_reduction, name_of
from dualdist.collectives.handle import Collective, Handle
from dualdist.collectives.negotiation import ENCODE, PAYLOAD_MARK, CollectiveRequest, RankRequests
from dualdist.collectives.rank_order import RankOrderBackend
from dualdist.collectives.reductions import LOCAL_OPS, Op, check_op, divide_, wire_op
from dualdist.collectives.tensor_utils import spec

if TYPE_CHECKING:
    from dualdist.collectives.group import Group

KIND = "allreduce"
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
    reduction: Reduction | None = None,
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
        and (reduction is None or type(reduction) is str)
        and op in FAST_OPS
    ):
        known = signature(op, tensor.dtype, tensor.shape, reduction or group.reduction)
        if name is None:
            group.num_unnamed += 1
            name = f"{KIND}.{group.num_unnamed}"
        else:
            name = name_of(group, KIND, name)
        request = f"{known.before_name}{ENCODE(name)}{known.after_name}".encode() + PAYLOAD_MARK
        found = group.run_blocking(FastAllreduce(group, tensor, op, name, known, request, in_place))
        if found is not None:
            return found.wait() if isinstance(found, Handle) else found
    scales = prescale, postscale
    return collectives.allreduce(
        group, as_tensor(tensor), op, name, *scales, reduction=reduction, in_place=in_place
    ).run()


@dataclass(frozen=True)
class AllreduceSignature:
    """The part of an allreduce that all calls with the same op, dtype and shape share."""

    shared_args: dict[str, Any]
    before_name: str  # of the message, whose other variable part is the name
    after_name: str
    wire_op: ReduceOp
    is_exact: bool  # no transport treats it in another way: Note [NaN]
    is_inline: bool
    is_ordered: bool  # Note [rank order]; inline payloads are reduced in rank order in any case


@functools.lru_cache(maxsize=4096)
def signature(op: Op, dtype: torch.dtype, shape: torch.Size, reduction: Reduction) -> AllreduceSignature:
    """Return what such calls share; raise UsageError if numbers of this dtype cannot be reduced by `op`."""
    check_op(op, dtype)
    check_reduction(reduction, op)
    shared_args = collectives.reduction_args([spec(dtype, shape)], "cpu", op, reduction=reduction)
    message = RankRequests((CollectiveRequest(KIND, ANY_NAME, shared_args),)).dumps().decode()
    before_name, _, after_name = message.partition(ENCODE(ANY_NAME))
    is_inline = shape.numel() * dtype.itemsize <= PAYLOAD_BYTES
    is_exact = not (dtype.is_floating_point and op in ("min", "max"))
    is_ordered = reduction == "ordered"
    return AllreduceSignature(shared_args, before_name, after_name, wire_op(op), is_exact, is_inline, is_ordered)


class FastAllreduce(NamedTuple):
    """One call that takes the fast path."""

    group: Group
    tensor: torch.Tensor
    op: Op
    name: str
    signature: AllreduceSignature
    request: bytes  # that all ranks must send
    in_place: bool

    def __str__(self) -> str:
        return f"{self._request}"

    @property
    def _request(self) -> CollectiveRequest:
        return CollectiveRequest(KIND, self.name, self.signature.shared_args)

    def collective(self) -> Collective[torch.Tensor]:
        """Return the same call for the general path."""
        return Collective(self.group, self._request, lambda backend, _: self._reduce(backend), self.tensor.device)

    def begin(self, backend: Backend, host: HostRanks | None) -> ControlAllgather | ShmMessage:
        """Begin to exchange requests, with an inline payload if the tensor is small."""
        is_inline = self.signature.is_inline
        if host is not None:
            return ShmMessage(host, self.request, self.tensor if is_inline else None)
        payload = self.tensor.detach().numpy().tobytes() if is_inline else b""
        return ControlAllgather(backend, self.request + payload, "exchange")

    def perform(self, backend: Backend, exchange: ControlAllgather | ShmMessage) -> torch.Tensor | None:
        """Return the reduction, or None if not all ranks requested the same."""
        known, rows = self.signature, None
        if isinstance(exchange, ShmMessage):
            if not exchange.all_equal():
                return None
            if known.is_inline:
                op: ReduceOp = "mean" if self.op == "mean" else known.wire_op
                return exchange.reduce_payloads(self.tensor, op, in_place=self.in_place)
        else:
            rows = exchange.suffixes(self.request)
            if rows is None:
                return None
        return self._reduce(backend, rows if known.is_inline else None)

    def _reduce(self, backend: Backend, rows: Sequence[bytes] | None = None) -> torch.Tensor:
        """Return the reduction of the ranks' inline payloads, or by the backend."""
        tensor, known = self.tensor.detach(), self.signature
        if rows is not None:
            values = torch.frombuffer(bytearray(b"".join(rows)), dtype=tensor.dtype)
            result = functools.reduce(LOCAL_OPS[known.wire_op], values.view(-1, *tensor.shape).unbind())
        else:
            name = f"op.{self.name}.0"
            backend = RankOrderBackend(backend) if known.is_ordered else backend
            if "cpu" in backend.mean_devices and known.is_exact:
                op: ReduceOp = "mean" if self.op == "mean" else known.wire_op
                output = tensor if self.in_place else torch.empty_like(tensor)
                backend.allreduce_(output, op, name, tensor).wait()
                return self.tensor if self.in_place else output
            result = tensor if self.in_place else tensor.clone()
            flat = result.view(-1)
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

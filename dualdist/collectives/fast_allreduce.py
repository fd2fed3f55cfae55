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
from typing import TYPE_CHECKING, Any

import torch

from dualdist.backends.base import Backend
from dualdist.collectives import collectives, reductions
from dualdist.collectives.arguments import name_of
from dualdist.collectives.negotiation import ENCODE, PAYLOAD_MARK, CollectiveRequest, RankRequests
from dualdist.collectives.reductions import Op, check_op, finalize_, reduce_rows, wire_op
from dualdist.collectives.tensor_utils import spec
from dualdist.collectives.work import Handle, PendingOperation

if TYPE_CHECKING:
    from dualdist.collectives.group import Group

KIND = "allreduce"
# Bytes of values that ride along; with the rest of the message they fit the first sheet of every kind of exchange.
RIDERS_BYTES = 128
# What NumPy hands out as bytes, and torch calculates with as it is.
PLAIN = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))
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
    """What collectives.allreduce gives, or allreduce_ in place, waited for."""
    if prescale == 1.0 == postscale and fits(tensor, op):
        express = FastAllreduce(group, tensor, op, name, in_place=in_place)
        found = group.run_blocking(express)
        if found is not None:
            return found.wait() if isinstance(found, Handle) else found
        name = express.name
    usual = collectives.allreduce_ if in_place else collectives.allreduce
    return usual(group, tensor, op, name, prescale, postscale).wait()


def fits(tensor: torch.Tensor, op: object) -> bool:
    """Whether the quick way is open to an allreduce of this tensor."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.numel() > 0
        and type(op) is str
        and op != "adasum"
    )


@dataclass(frozen=True)
class AllreduceSignature:
    """What all calls with the same kind of tensor have in common: the message is the name between two texts."""

    terms: dict[str, Any]
    before_name: str
    after_name: str
    values_ride: bool


@functools.lru_cache(maxsize=4096)
def signature(op: Op, dtype: torch.dtype, shape: torch.Size) -> AllreduceSignature:
    """UsageError where numbers of this dtype cannot be reduced by `op`."""
    check_op(op, dtype)
    terms = {"tensors": [spec(dtype, shape)], **collectives.reduction_terms("cpu", op)}
    message = RankRequests((CollectiveRequest(KIND, ANY_NAME, terms),)).dumps().decode()
    before_name, _, after_name = message.partition(ENCODE(ANY_NAME))
    return AllreduceSignature(terms, before_name, after_name, shape.numel() * dtype.itemsize <= RIDERS_BYTES)


class FastAllreduce:
    """An allreduce of a tensor that fits, whose caller waits for it."""

    def __init__(self, group: Group, tensor: torch.Tensor, op: Op, name: str | None, *, in_place: bool) -> None:
        known = signature(op, tensor.dtype, tensor.shape)
        self.name = name_of(group, KIND, name)
        self.agreed = f"{known.before_name}{ENCODE(self.name)}{known.after_name}".encode() + PAYLOAD_MARK
        self.message = self.agreed + tensor.detach().numpy().tobytes() if known.values_ride else self.agreed
        self._known = known
        self._tensor = tensor
        self._op = op
        self._in_place = in_place

    def __str__(self) -> str:
        return self._offer.what

    @property
    def _offer(self) -> CollectiveRequest:
        return CollectiveRequest(KIND, self.name, self._known.terms)

    def operation(self) -> PendingOperation[torch.Tensor]:
        """The same, for the usual way."""
        return PendingOperation(self._offer, lambda backend, own: self._reduced(backend), self._tensor.device)

    def perform(self, backend: Backend, inline_payloads: Sequence[bytes]) -> torch.Tensor:
        """The reduction, given what has come along with every rank's message."""
        if not self._known.values_ride:
            return self._reduced(backend)
        rows = torch.frombuffer(bytearray(b"".join(inline_payloads)), dtype=self._tensor.dtype)
        found = reduce_rows(rows.view(len(inline_payloads), *self._tensor.shape), wire_op(self._op))
        finalize_(found, self._op, backend.size, 1.0)
        if not self._in_place:
            return found
        self._tensor.detach().copy_(found)
        return self._tensor

    def _reduced(self, backend: Backend) -> torch.Tensor:
        """The reduction by the backend."""
        target = self._tensor if self._in_place else self._tensor.detach().clone()
        flat = target.detach().view(-1)
        reductions.allreduce_(backend, flat, wire_op(self._op), f"op.{self.name}.0").wait()
        finalize_(flat, self._op, backend.size, 1.0)
        return target

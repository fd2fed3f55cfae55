"""Negotiation: from the requests of all ranks each computes what to perform next, or why the ranks disagree."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from dualdist.errors import UsageError
from dualdist.utils.suggest import SHOWN, format_ranks, ranks_by_value

ENCODE = json.JSONEncoder(separators=(",", ":")).encode
# Between a rank's requests and an inline payload: Note [inline payload]. JSON does not contain it.
PAYLOAD_MARK = b"\0"
# The collectives in which ranks that have joined take part with zeros.
WITH_JOINED = ("allreduce", "grouped_allreduce")
REFUSED = "refused"  # in place of shared arguments: why this rank cannot take part


@dataclass(frozen=True)
class CollectiveRequest:
    """A collective that a rank is ready for: `shared_args` must be the same on all ranks, `rank_args` need not."""

    kind: str
    name: str
    shared_args: dict[str, Any]
    rank_args: Any = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}{self._tensors}"

    @property
    def refusal(self) -> str:
        """Return why this rank cannot take part, or ""."""
        return f"{self.shared_args.get(REFUSED, '')}"

    @functools.cached_property
    def encoded(self) -> str:
        """Return the request as JSON; raise UsageError if it holds anything but texts, numbers, and lists of them."""
        try:
            return ENCODE([self.kind, self.name, self.shared_args, self.rank_args])
        except TypeError as error:
            raise UsageError(f"{self.kind} {self.name!r}: {error}: pass plain numbers and texts") from error

    @property
    def arguments(self) -> str:
        """Return the kind and the shared arguments as text, without the name."""
        others = [f"{key} {value}" for key, value in self.shared_args.items() if key != "tensors"]
        return f"{self.kind}{self._tensors}" + "".join(f", {other}" for other in others)

    @property
    def _tensors(self) -> str:
        tensors = self.shared_args.get("tensors", [])
        more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
        return f" of {', '.join(tensors[:SHOWN])}{more}" if tensors else ""


@dataclass(frozen=True, order=True)
class JoinedAt:
    """When a rank joined: after how many exchanges and gradient reductions, at which second of its clock.

    The clock decides only between ranks that have done nothing together in between.
    """

    exchanges: int
    gradient_reductions: int
    clock_s: float
    num_unnamed: int  # afterwards all ranks go on from the highest


@dataclass(frozen=True)
class RankRequests:
    """The state of one rank: its requests, and the name of the one that blocks its program.

    `begun` counts the reductions of gradients that the program has begun, where operations begin in its order.
    """

    requests: tuple[CollectiveRequest, ...] = ()
    waiting: str = ""
    joined: JoinedAt | None = None
    begun: int = 0

    @property
    def summary(self) -> str:
        """Return what the rank is ready for, as text."""
        if self.joined:
            return "join"
        return ", ".join(map(str, self.requests[:SHOWN])) or "nothing"

    def dumps(self) -> bytes:
        requests = ",".join(request.encoded for request in self.requests)
        joined = None if self.joined is None else astuple(self.joined)
        begun = f",{self.begun}" if self.begun else ""
        return f"[[{requests}],{ENCODE(self.waiting)},{ENCODE(joined)}{begun}]".encode()

    @staticmethod
    def loads(data: bytes) -> RankRequests:
        requests, waiting, joined, *begun = json.loads(data.partition(PAYLOAD_MARK)[0])
        return RankRequests(
            tuple(CollectiveRequest(*request) for request in requests),
            waiting,
            None if joined is None else JoinedAt(*joined),
            *begun,
        )

    def request(self, name: str) -> CollectiveRequest | None:
        """Return the request of this name, if the rank has one."""
        return next((request for request in self.requests if request.name == name), None)


@dataclass(frozen=True)
class Response:
    """The next steps of all ranks: names to perform, in this order, and names to refuse, each with a reason.

    Once all ranks have joined nothing is left to do, and `last_joined` is the rank that joined last.
    """

    agreed: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    last_joined: int | None = None


def compute_response(rows: Sequence[RankRequests], ranks: Sequence[int]) -> Response:
    """Agree on what all ranks are ready for, in the order of the first rank that has not joined.

    If all programs are blocked, and not on the same collective, they can never go on: what they wait for is refused.

    Args:
        rows: The state of each rank, in the order of `ranks`.
        ranks: The ranks of the group.
    """
    if all(row.joined for row in rows):
        return Response(last_joined=max((row.joined, rank) for rank, row in zip(ranks, rows, strict=True))[1])
    active = [(rank, row) for rank, row in zip(ranks, rows, strict=True) if not row.joined]
    active_ranks = [rank for rank, _ in active]
    joined = [rank for rank in ranks if rank not in active_ranks]
    points = ranks_by_value([row.begun for _, row in active], active_ranks)
    agreed: list[str] = []
    refused: list[tuple[str, str]] = []
    for request in active[0][1].requests:
        found = [other for _, row in active if (other := row.request(request.name)) is not None]
        if len(found) < len(active):
            continue
        reason = _find_mismatch(found, active_ranks, joined)
        if not reason and len(points) > 1:
            reason = "the ranks begin it at different points of their programs: " + "; ".join(
                f"{format_ranks(members)} after {begun} buckets of gradients" for begun, members in points.items()
            )
        if reason:
            refused.append((request.name, reason))
        else:
            agreed.append(request.name)
    if agreed or refused:
        return Response(tuple(agreed), tuple(refused))
    blocking = [other for _, row in active if (other := row.request(row.waiting)) is not None]
    if len(blocking) < len(active):
        return Response()
    texts = [f"{other}, where {other.refusal}" if other.refusal else f"{other}" for other in blocking]
    clauses = [f"{format_ranks(some)} in {text}" for text, some in ranks_by_value(texts, active_ranks).items()]
    if joined:
        clauses.append(f"{format_ranks(joined)} in join")
    reason = f"the ranks wait for different operations: {'; '.join(clauses)}"
    return Response(refused=tuple((name, reason) for name in dict.fromkeys(row.waiting for _, row in active)))


def _find_mismatch(found: Sequence[CollectiveRequest], ranks: Sequence[int], joined: Sequence[int]) -> str:
    """Return why these ranks cannot perform their requests of one name together, or ""."""
    request = found[0]
    refusals = ranks_by_value([other.refusal for other in found], ranks)
    refusals.pop("", None)
    if refusals:
        return "; ".join(f"{format_ranks(some)} cannot take part: {text}" for text, some in refusals.items())
    if any((other.kind, other.shared_args) != (request.kind, request.shared_args) for other in found):
        arguments = ranks_by_value([other.arguments for other in found], ranks)
        return "the ranks passed different arguments: " + "; ".join(
            f"{format_ranks(some)} {text}" for text, some in arguments.items()
        )
    if joined and request.kind not in WITH_JOINED:
        return f"{format_ranks(joined)} called join, and until all have, the others can only {' or '.join(WITH_JOINED)}"
    return ""

"""What the ranks of a group do next, decided by every rank alike from what each of them is ready to do."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from dualdist.errors import UsageError
from dualdist.utils.suggest import SHOWN, format_ranks

ENCODE = json.JSONEncoder(separators=(",", ":")).encode
# Between what a rank says and what comes along with it: Note [inline payload]. JSON does not hold it.
PAYLOAD_MARK = b"\0"
# What the ranks that go on may still do when others have joined, who take part with zeros.
WITH_JOINED = ("allreduce", "grouped_allreduce")


@dataclass(frozen=True)
class CollectiveRequest:
    """An operation that a rank is ready for: terms are the same on every rank, its own part (say, its rows) is not."""

    kind: str
    name: str
    terms: dict[str, Any]
    own: Any = None

    def __str__(self) -> str:
        return self.what

    @functools.cached_property
    def what(self) -> str:
        """In the words of an error."""
        return f"{self.kind} {self.name!r}{self._tensors}"

    @functools.cached_property
    def encoded(self) -> str:
        """As JSON; UsageError where it holds something else than texts, numbers, and lists of them."""
        try:
            return ENCODE([self.kind, self.name, self.terms, self.own])
        except TypeError as error:
            raise UsageError(f"{self.kind} {self.name!r}: {error}: pass plain numbers and texts") from error

    @property
    def words(self) -> str:
        """Without its name, and with all that the ranks must agree on."""
        others = [f"{key} {value}" for key, value in self.terms.items() if key != "tensors"]
        return f"{self.kind}{self._tensors}" + "".join(f", {other}" for other in others)

    @property
    def _tensors(self) -> str:
        tensors = self.terms.get("tensors", [])
        more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
        return f" of {', '.join(tensors[:SHOWN])}{more}" if tensors else ""


@dataclass(frozen=True)
class JoinedAt:
    """When a rank joined: after so many exchanges and gradient rounds of its group, at this second of its clock.

    The clock decides only between ranks that have done nothing with each other in between.
    """

    exchanges: int
    rounds: int
    clock_s: float
    num_unnamed: int  # operations that the rank has given a number; afterwards all go on from the highest


@dataclass(frozen=True)
class RankRequests:
    """What a rank says of itself; `waiting` names the operation without which its program does not go on."""

    offers: tuple[CollectiveRequest, ...] = ()
    waiting: str = ""
    joined: JoinedAt | None = None

    @property
    def words(self) -> str:
        """What it is ready for, in the words of an error."""
        if self.joined:
            return "join"
        return ", ".join(offer.what for offer in self.offers[:SHOWN]) or "nothing"

    def dumps(self) -> bytes:
        offers = ",".join(offer.encoded for offer in self.offers)
        joined = None if self.joined is None else astuple(self.joined)
        return f"[[{offers}],{ENCODE(self.waiting)},{ENCODE(joined)}]".encode()

    @staticmethod
    def loads(data: bytes) -> RankRequests:
        offers, waiting, joined = json.loads(data.partition(PAYLOAD_MARK)[0])
        return RankRequests(
            tuple(CollectiveRequest(*offer) for offer in offers), waiting, None if joined is None else JoinedAt(*joined)
        )

    def offer(self, name: str) -> CollectiveRequest | None:
        """The operation of this name, if the rank is ready for it."""
        return next((offer for offer in self.offers if offer.name == name), None)


@dataclass(frozen=True)
class Response:
    """What happens now, in this order; refused are the names of operations, each with the reason for its error.

    Once all ranks have joined, nothing is left to do, and `last_joined` is the one that joined last.
    """

    agreed: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    last_joined: int | None = None


def compute_response(rows: Sequence[RankRequests], ranks: Sequence[int]) -> Response:
    """Whatever all ranks are ready for, in the order of the first of them; rows come in the order of ranks.

    Where all programs wait, and not for the same, no rank can ever go on: then what they wait for is refused.
    """
    active = [(rank, row) for rank, row in zip(ranks, rows, strict=True) if not row.joined]
    if not active:
        order = {rank: (row.joined and astuple(row.joined), rank) for rank, row in zip(ranks, rows, strict=True)}
        return Response(last_joined=max(ranks, key=order.__getitem__))
    joined = [rank for rank, row in zip(ranks, rows, strict=True) if row.joined]
    agreed: list[str] = []
    refused: list[tuple[str, str]] = []
    for offer in active[0][1].offers:
        offers = [(rank, row.offer(offer.name)) for rank, row in active]
        found = [(rank, other) for rank, other in offers if other is not None]
        if len(found) < len(active):
            continue
        reason = _objection(offer, found, joined)
        if reason:
            refused.append((offer.name, reason))
        else:
            agreed.append(offer.name)
    if not agreed and not refused and all(row.offer(row.waiting) for _, row in active):
        said = "; ".join(f"{format_ranks(ranks)} in {what}" for what, ranks in _by_words(active).items())
        reason = f"the ranks wait for different operations: {said}" + (
            f"; {format_ranks(joined)} in join" if joined else ""
        )
        names = dict.fromkeys(row.waiting for _, row in active)
        return Response(refused=tuple((name, reason) for name in names))
    return Response(tuple(agreed), tuple(refused))


def _objection(offer: CollectiveRequest, found: Sequence[tuple[int, CollectiveRequest]], joined: Sequence[int]) -> str:
    """Why the ranks cannot do this together, or nothing."""
    if any((other.kind, other.terms) != (offer.kind, offer.terms) for _, other in found):
        said: dict[str, list[int]] = {}
        for rank, other in found:
            said.setdefault(other.words, []).append(rank)
        return "the ranks passed different arguments: " + "; ".join(
            f"{format_ranks(ranks)} {words}" for words, ranks in said.items()
        )
    if joined and offer.kind not in WITH_JOINED:
        return f"{format_ranks(joined)} called join, and until all have, the others can only {' or '.join(WITH_JOINED)}"
    return ""


def _by_words(active: Sequence[tuple[int, RankRequests]]) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    for rank, row in active:
        offer = row.offer(row.waiting)
        assert offer is not None, "only asked where every rank waits for something that it offers"
        said.setdefault(offer.what, []).append(rank)
    return said

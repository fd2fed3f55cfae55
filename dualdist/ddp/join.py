"""join: a rank that has no more data lets the others go on, and takes part in what they do with zeros."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dualdist.collectives.group import Group
from dualdist.collectives.negotiation import CollectiveRequest, JoinedAt, RankRequests, compute_response
from dualdist.collectives.work import PendingOperation, own_parts
from dualdist.ddp.bucket_plan import DROPS, HAS_JOINED, TAKES_PART
from dualdist.ddp.nonfinite import NonFiniteReport, nonfinite_kinds
from dualdist.ddp.reduction_plan import ReductionPlan, active_plans, allreduce_due_flags
from dualdist.monitoring.monitored import require_responsive
from dualdist.utils.deadline import Deadline

if TYPE_CHECKING:
    from dualdist.backends.base import Work
    from dualdist.ddp.buckets import Bucket


class JoinedRank:
    """Takes part in the rounds of a group's other ranks.

    The first message of a round is under way all the time: when it arrives, the others have begun a round, or all have
    joined. It is the flags that say which optimizers are due or, where the group has one only, that one's first bucket.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._all_rounds: list[ReductionPlan] = group.reducers
        self._flags: torch.Tensor | None = None
        self._work: Work | None = None
        self._first: Bucket | None = None
        self._is_over = len(active_plans(group)) < 2 and not any(rounds.buckets for rounds in active_plans(group))
        for rounds in self._all_rounds:
            reducer = rounds.reducer()
            if reducer is not None:
                reducer.drop_interrupted()
        self._begin()

    def arrived(self) -> bool:
        """Whether the others have begun a round."""
        if self._is_over:
            return False
        if self._first is not None:
            return self._first.done()
        return self._work is not None and self._work.done()

    def follow(self) -> None:
        """Go through the round that has begun; waits for its first message if need be."""
        if self._first is not None:
            self._first.wait()
            self._is_over = not (self._first.any_rank_set(TAKES_PART) or self._first.any_rank_set(DROPS))
            if not self._is_over:
                self._go_through(active_plans(self._group)[0], self._first)
        elif self._work is not None and self._flags is not None:
            self._work.wait()
            self._is_over = not self._flags[-1]
            for rounds, is_due in zip(self._all_rounds, self._flags, strict=False):
                if is_due and rounds.buckets:
                    self._go_through(rounds, self._launched(rounds, 0))
        self._begin()

    def finish(self) -> None:
        """All have joined: the message under way, which all have sent, arrives."""
        while not self._is_over:
            self.follow()

    def _begin(self) -> None:
        if self._is_over:
            return
        rounds = active_plans(self._group)
        if len(rounds) == 1:
            self._first = self._launched(rounds[0], 0)
        else:
            self._flags = torch.zeros(len(self._all_rounds) + 1, dtype=torch.int32, device="cpu")
            self._work = allreduce_due_flags(self._group, self._flags)

    def _go_through(self, rounds: ReductionPlan, first: Bucket) -> None:
        buckets = [first, *(self._launched(rounds, place) for place in range(1, len(rounds.buckets)))]
        for bucket in buckets:
            bucket.wait()
        if self._group.wait_times is not None:
            self._group.wait_times.skip(self._group.wait_times.rounds)
        if buckets[-1].any_rank_set(DROPS):
            return
        for bucket in buckets:
            bucket.unpack()
        blame = None if rounds.config.check_every is None else NonFiniteReport()
        if blame is not None:
            blame.look(buckets, lambda place, member: None)
        for place, bucket in enumerate(buckets):
            apart = bucket.to_reduce_apart(bucket.read_flags())
            for member, as_dense in apart:
                reduced = bucket.reduce_apart(member, None, as_dense=as_dense)
                if blame is not None and nonfinite_kinds(reduced):
                    blame.note((place, member), None)
            rounds.set_apart(place, [member for member, _ in apart])
        if blame is not None:
            blame.shared(self._group.gradients)

    def _launched(self, rounds: ReductionPlan, place: int) -> Bucket:
        bucket = rounds.bucket(place, self._group.gradients)
        bucket.launch([None] * len(bucket.plan.shapes), HAS_JOINED)
        return bucket


# Seconds between two looks at what the other ranks do.
LOOK_S = 0.0005


def join(group: Group, stand_in: Callable[[CollectiveRequest], PendingOperation[Any]]) -> int:
    """Take part in what the others do until all have joined; returns the rank that joined last.

    `stand_in` makes this rank's part of an operation that the others offer. Two things can come next, a user's
    operation or a round of gradients, each on a line of its own: this rank begins both, and follows what comes. It
    waits for as long as the others say that they are there. What this rank has begun itself is finished first.
    """
    group.require_usable()
    if group.size == 1:
        return group.ranks[0]
    group.finish_pending()
    timeout_s = group.backend.timeout_s
    with group.exclusive_progress(), group.monitor.operation("join"):
        row = RankRequests(joined=JoinedAt(group.exchanges, group.rounds, time.time(), group.num_unnamed)).dumps()
        gradients = JoinedRank(group)
        while True:
            exchange = group.exchange(row)
            quiet = Deadline(timeout_s)
            while not exchange.done():
                if gradients.arrived():
                    gradients.follow()
                    quiet = Deadline(timeout_s)
                elif quiet.passed():
                    require_responsive(group.monitor)
                    quiet = Deadline(timeout_s)
                else:
                    time.sleep(LOOK_S)
            rows = [RankRequests.loads(data) for data in exchange.wait()]
            decision = compute_response(rows, group.ranks)
            if decision.last_joined is not None:
                gradients.finish()
                group.num_unnamed = max(row.joined.num_unnamed for row in rows if row.joined is not None)
                group.rounds = max(row.joined.rounds for row in rows if row.joined is not None)
                return decision.last_joined
            for name in decision.agreed:
                offer = next(offer for row in rows if (offer := row.offer(name)) is not None)
                stand_in(offer).perform(group.backend, own_parts(rows, name))
                if group.wait_times is not None:
                    group.wait_times.skip(group.wait_times.operations)

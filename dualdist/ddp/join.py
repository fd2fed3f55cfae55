"""join: take part in the other ranks' operations with zeros until all ranks have joined."""

from __future__ import annotations

import time

from dualdist.collectives.collectives import zero_contribution
from dualdist.collectives.group import Group
from dualdist.collectives.handle import rank_args_of
from dualdist.collectives.negotiation import JoinedAt, RankRequests, compute_response
from dualdist.ddp.bucket import Bucket
from dualdist.ddp.layout import CONTRIBUTES, DISCARDS, HAS_JOINED
from dualdist.ddp.reduction_plan import DueFlags, ReductionPlan, active_plans
from dualdist.errors import UnsupportedError
from dualdist.utils.deadline import Deadline

POLL_S = 0.0005
# A joined rank waits for as long as the others go on.
PATIENCE_S = 7 * 24 * 3600.0


class JoinedRank:
    """Take part in the gradient reductions of a group's other ranks.

    The first message of a reduction is always under way: when it arrives, the others have begun one, or all have
    joined. It is the exchange of due reducers, or the first bucket if the group has one reducer only.
    """

    _first: Bucket | DueFlags

    def __init__(self, group: Group) -> None:
        self._group = group
        self._plans: list[ReductionPlan] = group.reducers
        self._is_over = len(active_plans(group)) < 2 and not any(plan.layouts for plan in active_plans(group))
        for plan in self._plans:
            reducer = plan.reducer()
            if reducer is not None:
                reducer.discard_interrupted()
        self._launch_first_message()

    def has_message_come(self) -> bool:
        """Return True if the other ranks have begun a reduction; moves what can be moved."""
        return not self._is_over and self._first.done()

    def run_reduction(self) -> None:
        """Take part in the reduction that has begun; wait for its first message if necessary."""
        if isinstance(self._first, Bucket):
            self._first.wait()
            self._is_over = not (self._first.any_rank_set(CONTRIBUTES) or self._first.any_rank_set(DISCARDS))
            if not self._is_over:
                self._reduce(active_plans(self._group)[0], self._first)
        else:
            due = self._first.wait()
            self._is_over = self._first.have_all_joined
            for number in due:
                if self._plans[number].layouts:
                    self._reduce(self._plans[number], self._launch(self._plans[number], 0))
        self._launch_first_message()

    def finish(self) -> None:
        """Wait for the message under way, once all ranks have joined."""
        while not self._is_over:
            self.run_reduction()

    def _launch_first_message(self) -> None:
        if self._is_over:
            return
        plans = active_plans(self._group)
        if len(plans) == 1:
            self._first = self._launch(plans[0], 0)
        else:
            self._first = DueFlags(self._group, has_joined=True)

    def _reduce(self, plan: ReductionPlan, first: Bucket) -> None:
        buckets = [first, *(self._launch(plan, index) for index in range(1, len(plan.layouts)))]
        for bucket in buckets:
            bucket.wait()
        if self._group.wait_times is not None:
            self._group.wait_times.skip(self._group.wait_times.gradient_reductions)
        if buckets[-1].any_rank_set(DISCARDS):
            return
        plan.finish(
            buckets,
            self._group.gradients,
            lambda _, bucket: bucket.members_to_unbucket(bucket.read_flags()),
            lambda bucket: [None] * len(bucket.layout.shapes),
        )

    def _launch(self, plan: ReductionPlan, bucket_index: int) -> Bucket:
        bucket = plan.make_bucket(bucket_index, self._group.gradients)
        bucket.values.zero_()
        bucket.launch([None] * len(bucket.layout.shapes), HAS_JOINED)
        return bucket


def join(group: Group) -> int:
    """Take part in the other ranks' operations until all have joined; return the rank that joined last.

    The other ranks may begin a user's operation or a reduction of gradients next, each on a separate channel: this rank
    begins both and follows the one that arrives, for as long as the others respond. Its own pending operations are
    finished first.

    Raises:
        UnsupportedError: a collective library of an accelerator moves the tensors.
    """
    group.require_usable()
    if group.size == 1:
        return group.ranks[0]
    if group.backend.in_program_order:
        raise UnsupportedError(
            f"dd.join() does not work over {group.backend.transport}, as a device does not tell the host what the "
            "other ranks do next: give every rank as many batches, as dd.Sampler does, or set "
            "DUALDIST_TRANSPORT=gloo, by which tensors go through host memory"
        )
    group.finish_pending()
    group.require_nothing_pending()
    group.is_joined = True
    try:
        with group.channel.failing("join"), group.monitor.operation("join"):
            last = _follow(group)
    finally:
        group.is_joined = False
    for plan in group.reducers:
        if (reducer := plan.reducer()) is not None:
            reducer.end_join()
    return last


def _follow(group: Group) -> int:
    """Take part in what the other ranks begin, until all have joined."""
    limit_s, channel = group.channel.timeout_s, group.channel
    joined_at = JoinedAt(group.exchanges, group.gradient_reductions, time.time(), group.num_unnamed)
    message = RankRequests(joined=joined_at).dumps()
    gradients = JoinedRank(group)
    while True:
        exchange = channel.start("join", lambda backend: group.exchange(message), timeout_s=PATIENCE_S)
        deadline = Deadline(limit_s)
        while not exchange.done():
            if gradients.has_message_come():
                gradients.run_reduction()
                deadline = Deadline(limit_s)
            elif deadline.passed():
                group.monitor.require_responsive()
                deadline = Deadline(limit_s)
            else:
                channel.check(Deadline(PATIENCE_S))
                time.sleep(POLL_S)
        requests = [RankRequests.loads(data) for data in exchange.wait()]
        response = compute_response(requests, group.ranks)
        if response.last_joined is not None:
            gradients.finish()
            joined = [each.joined for each in requests if each.joined is not None]
            group.num_unnamed = max(each.num_unnamed for each in joined)
            group.gradient_reductions = max(each.gradient_reductions for each in joined)
            return response.last_joined
        for name in response.agreed:
            request = next(found for each in requests if (found := each.request(name)) is not None)
            part, rank_args = zero_contribution(group, request), rank_args_of(requests, name)
            channel.run(request, lambda backend, part=part, rank_args=rank_args: part.perform(backend, rank_args))  # type: ignore[misc]
            if group.wait_times is not None:
                group.wait_times.skip(group.wait_times.operations)

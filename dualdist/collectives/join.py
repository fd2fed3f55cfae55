"""join: a rank that has no more data lets the others go on, and takes part in what they do with zeros."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dualdist.collectives.group import Group
from dualdist.collectives.negotiation import CollectiveRequest, JoinedAt, RankRequests, decide
from dualdist.collectives.work import PendingOperation, own_parts
from dualdist.ddp.joined_rank import JoinedRank
from dualdist.monitoring.monitored import require_answers
from dualdist.utils.deadline import Deadline

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
    with group.exclusive_progress(), group.watch.over("join"):
        row = RankRequests(joined=JoinedAt(group.exchanges, group.rounds, time.time(), group.named)).dumps()
        gradients = JoinedRank(group)
        while True:
            exchange = group.exchange(row)
            quiet = Deadline(timeout_s)
            while not exchange.done():
                if gradients.arrived():
                    gradients.follow()
                    quiet = Deadline(timeout_s)
                elif quiet.passed():
                    require_answers(group.watch)
                    quiet = Deadline(timeout_s)
                else:
                    time.sleep(LOOK_S)
            rows = [RankRequests.loads(data) for data in exchange.wait()]
            decision = decide(rows, group.ranks)
            if decision.last_joined is not None:
                gradients.finish()
                group.named = max(row.joined.named for row in rows if row.joined is not None)
                group.rounds = max(row.joined.rounds for row in rows if row.joined is not None)
                return decision.last_joined
            for name in decision.agreed:
                offer = next(offer for row in rows if (offer := row.offer(name)) is not None)
                stand_in(offer).perform(group.backend, own_parts(rows, name))
                if group.waits is not None:
                    group.waits.followed(group.waits.operations)

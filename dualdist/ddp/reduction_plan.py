"""What the rounds of gradients consist of, for those who run them and for those who have joined and follow."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from dualdist.ddp.adasum import AdasumBucket
from dualdist.ddp.bucket_plan import BucketPlan, ReducerConfig
from dualdist.ddp.buckets import Bucket

if TYPE_CHECKING:
    from dualdist.backends.base import Backend, Work
    from dualdist.collectives.group import Group
    from dualdist.ddp.reducer import Reducer


@dataclass
class ReductionPlan:
    """What the rounds of one reducer consist of. Outlives the reducer: a rank that has joined may have dropped it."""

    config: ReducerConfig
    reducer: weakref.ref[Reducer]
    buckets: list[BucketPlan] = field(default_factory=list)
    dense: dict[int, set[int]] = field(default_factory=dict)  # of each bucket the members that have been dense
    is_over: bool = False  # no rank has the reducer any more

    def bucket(self, place: int, line: Backend) -> Bucket:
        kind, dense = AdasumBucket if self.config.op == "adasum" else Bucket, self.dense.setdefault(place, set())
        return kind(self.buckets[place], self.config, line, dense)

    def clear(self) -> None:
        """There are no buckets."""
        self.buckets.clear()
        self.dense.clear()

    def set_apart(self, place: int, members: Sequence[int]) -> None:
        """From now on these members of a bucket travel by themselves: Note [sparse gradients]."""
        plan = self.buckets[place]
        if not plan.apart.issuperset(members):
            self.buckets[place] = replace(plan, apart=plan.apart.union(members))


def active_plans(group: Group) -> list[ReductionPlan]:
    """The rounds that are not over, the same on every rank."""
    return [rounds for rounds in group.reducers if not rounds.is_over]


def retire_unused(group: Group) -> None:
    """The rounds of reducers that no rank has any more are over, and their memory is given back; every rank calls this.

    A rank that has dropped one alone may still join, and follow its rounds.
    """
    asked = active_plans(group)
    if len(asked) < 2:
        return
    gc.collect()  # models are dropped in cycles
    is_unused = torch.tensor([rounds.reducer() is None for rounds in asked], dtype=torch.int32, device="cpu")
    group.gradients.allreduce_(is_unused, "min", "gradients.unused").wait()
    for rounds, is_over in zip(asked, is_unused.tolist(), strict=True):
        if is_over:
            rounds.is_over = True
            for plan in rounds.buckets:
                group.gradients.drop(plan.place)
            rounds.clear()


def allreduce_due_flags(group: Group, flags: torch.Tensor) -> Work:
    """Tell each other which reducers are due; the last flag says "I take part"."""
    return group.gradients.allreduce_(flags, "max", "gradients.due")

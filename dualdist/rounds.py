"""What the rounds of gradients consist of, for those who run them and for those who have joined and follow."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dualdist.adasum import Notices
from dualdist.buckets import Bucket, BucketPlan, Recipe

if TYPE_CHECKING:
    import torch

    from dualdist.backends.base import Backend, Work
    from dualdist.group import Group
    from dualdist.reducer import Reducer


@dataclass
class Rounds:
    """What the rounds of one reducer consist of. Outlives the reducer: a rank that has joined may have dropped it."""

    recipe: Recipe
    reducer: weakref.ref[Reducer]
    buckets: list[BucketPlan] = field(default_factory=list)

    def bucket(self, place: int, line: Backend) -> Bucket:
        return (Notices if self.recipe.op == "adasum" else Bucket)(self.buckets[place], self.recipe, line)

    def set_apart(self, place: int, members: Sequence[int]) -> None:
        """From now on these members of a bucket travel by themselves: Note [sparse gradients]."""
        plan = self.buckets[place]
        if not plan.apart.issuperset(members):
            self.buckets[place] = replace(plan, apart=plan.apart.union(members))


def launch_due(group: Group, flags: torch.Tensor) -> Work:
    """Tell each other which reducers are due; the last flag says "I take part"."""
    return group.gradients.allreduce_(flags, "max", "gradients.due")

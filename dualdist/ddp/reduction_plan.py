"""The buckets of a reducer's reductions, for the reducer itself and for ranks that have joined."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from typing import TYPE_CHECKING, Any

import torch

from dualdist.ddp.adasum import AdasumBucket
from dualdist.ddp.bucket_plan import BucketPlan, ReducerConfig
from dualdist.ddp.buckets import Bucket
from dualdist.ddp.compression import ErrorFeedback
from dualdist.ddp.error_feedback import FeedbackBucket, FeedbackState
from dualdist.ddp.step_checks import NonFiniteReport, nonfinite_kinds

if TYPE_CHECKING:
    from dualdist.collectives.group import Group
    from dualdist.engine.channel import Channel, Work

IS_RETIRED = operator.attrgetter("is_retired")


@dataclass
class ReductionPlan:
    """The buckets of one reducer. Outlives the reducer, which a rank that has joined may have deleted."""

    config: ReducerConfig
    reducer: weakref.ref[Any]
    buckets: list[BucketPlan] = field(default_factory=list)
    dense: dict[int, set[int]] = field(default_factory=dict)  # by bucket: members known to be dense on all ranks
    is_retired: bool = False  # no rank has the reducer any more
    feedback: FeedbackState | None = field(init=False)  # with PowerSGD and top-k, until it is retired

    def __post_init__(self) -> None:
        compressor = self.config.compressor
        self.feedback = FeedbackState(compressor) if isinstance(compressor, ErrorFeedback) else None

    def make_bucket(self, bucket_index: int, channel: Channel) -> Bucket:
        plan, dense = self.buckets[bucket_index], self.dense.setdefault(bucket_index, set())
        if self.feedback is not None:
            return FeedbackBucket(plan, self.config, channel, dense, self.feedback)
        kind = AdasumBucket if self.config.op == "adasum" else Bucket
        return kind(plan, self.config, channel, dense)

    def finish(
        self,
        buckets: Sequence[Bucket],
        channel: Channel,
        assign: Callable[[int, Bucket], list[tuple[int, bool]]],
        params_of: Callable[[Bucket], list[torch.Tensor | None]],
    ) -> dict[int, list[int]]:
        """Finalize and assign the gradients, after all buckets have been waited for; every rank calls this.

        `assign` takes the gradients from a bucket, and returns the members that are reduced separately.

        Returns:
            With check_every, the kinds on every rank of the gradients that are not finite, by the parameter's number.
        """
        for bucket in buckets:
            bucket.unpack()
        if self.feedback is not None:
            self.feedback.commit(buckets)
        report = None if self.config.check_every is None else NonFiniteReport()
        if report is not None:
            report.scan(buckets, params_of)
        for bucket_index, bucket in enumerate(buckets):
            unbucketed = assign(bucket_index, bucket)
            params = params_of(bucket) if unbucketed else []
            for index, as_dense in unbucketed:
                param = params[index]
                grad = None if param is None else param.grad
                reduced = bucket.reduce_unbucketed(index, grad, as_dense=as_dense)
                if param is not None:
                    param.grad = reduced
                if report is not None and nonfinite_kinds(reduced):
                    report.add(bucket.plan.numbers[index], grad)
            if unbucketed:
                self.unbucket(bucket_index, [index for index, _ in unbucketed])
        return {} if report is None else report.exchange(channel)

    def clear(self) -> None:
        self.buckets.clear()
        self.dense.clear()

    def retire(self) -> None:
        """Release the memory of a plan whose reducer no rank has any more; the group keeps its place in the order."""
        self.is_retired = True
        self.feedback = None  # with a residual of the size of the model
        self.clear()

    def unbucket(self, bucket_index: int, members: Sequence[int]) -> None:
        """Reduce these members of a bucket separately from now on: Note [sparse gradients]."""
        plan = self.buckets[bucket_index]
        if not plan.unbucketed.issuperset(members):
            self.buckets[bucket_index] = replace(plan, unbucketed=plan.unbucketed.union(members))


def active_plans(group: Group) -> list[ReductionPlan]:
    """Return the plans that are not retired, the same on every rank."""
    return [*filterfalse(IS_RETIRED, group.reducers)]


def retire_unused(group: Group) -> None:
    """Retire the plans whose reducer no rank has any more, and release their memory; every rank calls this.

    A rank that alone has deleted a reducer may still join, and follow its reductions.
    """
    plans = active_plans(group)
    if len(plans) < 2:
        return
    gc.collect()  # deleted models are in reference cycles
    is_unused = torch.tensor([plan.reducer() is None for plan in plans], dtype=torch.int32, device="cpu")
    name = "gradients.unused"
    group.gradients.run(name, lambda backend: backend.allreduce_(is_unused, "min", name))
    for plan, is_retired in zip(plans, is_unused.tolist(), strict=True):
        if is_retired:
            plan.retire()


def allreduce_due_flags(group: Group, flags: torch.Tensor) -> Work[torch.Tensor]:
    """Exchange which reducers are due; the last flag says that this rank has not joined."""
    name = "gradients.due"
    return group.gradients.start(name, lambda backend: backend.allreduce_(flags, "max", name))

"""Reduce gradients during backward(): launch full buckets in the same order on every rank, and finish at its end.

Note [bucket order]: all ranks must reduce the same buckets in the same order, but autograd may finish gradients in a
different order on each rank, and skip those that a rank's loss does not use. So a full bucket is launched only after
all before it, and the rest when backward ends. A gradient that is None is sent as zeros with a flag.

Note [several optimizers]: ranks may differ in which of several optimizers a backward touches. So once a session has
several, nothing is launched early: when backward ends the ranks exchange, in one small message, which reducers are
due, and reduce those in the order of their creation.

Note [interrupted backward]: a backward that raises never runs its final callback, while the other ranks wait for the
buckets it had not launched. So the next backward first completes that round, with the flag DISCARDS in its last
bucket, which is never launched before a backward ends. All ranks then discard the round, whichever backward they took
it for: a rank whose backward raised before anything was launched does not know of it. The gradients stay as they are,
and the new round reduces them. A backward inside a backward (re-entrant checkpointing) looks the same and is handled
the same; its end reduces once more, which does not change a mean.

On a GPU the host does not wait to read the others' flags; only a rank that discards a round does. If another rank has
taken that round for its own, the group fails.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from dualdist.backends.control_plane import broadcast_object
from dualdist.collectives.broadcast_state import allgather_object
from dualdist.ddp.bucket_plan import CONTRIBUTES, DISCARDS, HAS_JOINED, ReducerConfig
from dualdist.ddp.flat_buffer import refuse_capture
from dualdist.ddp.param_buckets import Errors, ParamBuckets
from dualdist.ddp.reduction_plan import active_plans, allreduce_due_flags
from dualdist.ddp.step_checks import NonFiniteReport, nonfinite_kinds
from dualdist.errors import CollectiveError, UsageError

if TYPE_CHECKING:
    from dualdist.collectives.group import Group

_current_backward = torch._C._current_graph_task_id


class Reducer(ParamBuckets):
    """Reduce the gradients of one optimizer's parameters at the end of every `accumulate`-th backward.

    All ranks run the same number of backwards between two steps, with one exception: a rank whose backward uses none
    of the parameters takes part when it steps. See ParamBuckets for the arguments.
    """

    def __init__(
        self,
        group: Group,
        parameters: Callable[[], Sequence[torch.Tensor]],
        named_parameters: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        config: ReducerConfig,
        accumulate: int,
        *,
        fused_groups: Sequence[Sequence[torch.Tensor]] = (),
        next_group: Callable[[], Group] | None = None,
        errors: Errors = contextlib.nullcontext,
    ) -> None:
        self.is_suspended = False  # skip reduction, like DDP's no_sync()
        # With check_every: kinds by rank for each parameter whose gradient is not finite, the number of reductions, and
        # whether some ranks had joined in the last one.
        self.nonfinite: dict[int, list[int]] = {}
        self.num_reductions = 0
        self.has_joined_ranks = False
        self._lock = threading.RLock()  # autograd runs the hooks of each device in a separate thread
        self._ready: dict[int, None] = {}  # parameters whose gradients are ready, in that order
        self._next_bucket = 0  # the first that has not been launched
        self._open_backwards: set[int] = set()  # autograd's ids of backwards that have not ended
        self._num_backwards = 0  # since the last reduction
        self._num_rounds = 0  # since the last step
        self._last_sums: list[weakref.ref[torch.Tensor]] = []  # the gradients assigned last, with op="sum"
        super().__init__(
            group,
            parameters,
            named_parameters,
            config,
            accumulate,
            fused_groups=fused_groups,
            next_group=next_group,
            errors=errors,
        )

    def _enter(self, group: Group) -> None:
        super()._enter(group)
        self._ready.clear()
        self._open_backwards.clear()
        self._next_bucket = self._num_backwards = self._num_rounds = 0

    def synchronize(self) -> None:
        """Reduce now, however many backwards have run, unless they have been reduced already."""
        self._require_open()
        if self._num_rounds == 0 or self._num_backwards:
            with self.errors(), self.group.fail_on_error():
                _run_round(self.group, [self])

    def reset_step(self) -> None:
        """Begin the next step: the gradients have been used or cleared."""
        self._num_rounds = self._num_backwards = 0
        self.nonfinite = {}

    def set_order(self, order: Sequence[int]) -> None:
        """Rebuild the buckets in the order of another run; every rank calls this, between two steps.

        Sums over more than two ranks depend, in the last bit, on the position of a gradient in its bucket.
        """
        if self._fused_groups or self._config.op == "adasum":  # whose order is that of registration
            return
        if order != self.order and sorted(order) == list(range(len(self._references))):
            # An interrupted backward may have got further on some ranks than on others.
            launched = allgather_object(self.group, self._next_bucket)
            with self.errors(), self.group.fail_on_error():
                if any(launched):
                    self._discard_round()
                self._adopt_order(order)

    def on_grad_ready(self, param: torch.Tensor, number: int) -> None:
        with self._lock:
            if self.is_suspended:
                return
            backward = _current_backward()
            if backward not in self._open_backwards:
                with self.errors(), self.group.fail_on_error():
                    self._begin_backward(backward)
                number = self._numbers.get(id(param), number)  # a new group renumbers
            if self._num_backwards + 1 < self.accumulate or number in self._ready:
                return
            self._ready[number] = None
            bucket = self._buckets[self._bucket_of[number]]
            if bucket.streams is not None:
                bucket.streams.record()
            index = self._index_in_bucket[number]
            if index in bucket.large_members:
                bucket.pack(index, param.grad)
            bucket.num_pending -= 1
            if bucket.num_pending == 0 and len(active_plans(self.group)) == 1:
                with self.errors(), self.group.fail_on_error():
                    self._launch_full()

    def _launch_full(self) -> None:
        while self._next_bucket < len(self._buckets) - 1 and self._buckets[self._next_bucket].num_pending == 0:
            self._launch_next()
        for bucket in self._buckets[: self._next_bucket]:
            bucket.done()  # some transports progress only when polled

    def _launch_next(self, flag: int = CONTRIBUTES) -> None:
        params = [self._references[number]() for number in self._members[self._next_bucket]]
        self._buckets[self._next_bucket].launch([None if param is None else param.grad for param in params], flag)
        self._next_bucket += 1

    def _begin_backward(self, backward: int) -> None:
        self._require_open()
        if any(bucket.streams is not None for bucket in self._buckets):
            refuse_capture()
        self.discard_interrupted_round()
        if len(active_plans(self.group)) == 1:  # else in _run_round, once the ranks know which reducers are due
            self.update()
        self._open_backwards.add(backward)
        Variable._execution_engine.queue_callback(lambda: self._end_backward(backward))

    def _end_backward(self, backward: int) -> None:
        """Reduce what is due; every reducer of the backward is called, and the first does it for all."""
        due = [reducer for reducer in _live_reducers(self.group) if reducer._count_backward(backward)]
        if due:
            with self.errors(), self.group.fail_on_error():
                _run_round(self.group, due)

    def _count_backward(self, backward: int) -> bool:
        """Count the end of a backward; return True if this reducer took part and is due."""
        with self._lock:
            if backward not in self._open_backwards:
                return False
            self._open_backwards.clear()  # the others were interrupted
            self._num_backwards += 1
            return self._num_backwards >= self.accumulate

    def discard_interrupted_round(self) -> None:
        """Complete and discard the round of a backward that raised: Note [interrupted backward]."""
        if self._next_bucket == 0:
            self._reset_round()
        else:
            self._discard_round()

    def _discard_round(self) -> None:
        """Complete the current round on all ranks, leaving the gradients as they are."""
        self._launch_rest_and_wait(DISCARDS)
        last = self._buckets[-1]
        if last.reads_flags_late and last.any_rank_set(CONTRIBUTES):
            raise CollectiveError(
                "a backward raised on this rank after part of its gradients had been sent, and another rank has used "
                "them as those of its own backward: resume from a checkpoint"
            )
        self._reset_round()

    def _reduce(self) -> None:
        """Reduce all gradients and assign the results."""
        if self._config.op == "sum" and self._num_rounds and self._holds_last_sums():
            raise UsageError(
                "a second backward before step() would add up again what is the sum over all ranks already: call "
                "zero_grad() in between, use accumulate=k for k backwards a step, or op='mean'"
            )
        with self._lock:
            self._finish_round()
            self._num_backwards = 0
            self._num_rounds += 1
            self.group.gradient_reductions += 1

    def _holds_last_sums(self) -> bool:
        """Return True if a parameter's gradient is still the tensor of the last sum."""
        sums = {id(grad) for reference in self._last_sums if (grad := reference()) is not None}
        return any(id(param.grad) in sums for param in self.params)

    def _finish_round(self) -> None:
        ready = list(self._ready)
        self._launch_rest_and_wait()
        while self._was_discarded():
            self._reset_round()
            self._launch_rest_and_wait()
        must_rebuild = self._must_rebuild_buckets()
        self._assign_grads()
        if must_rebuild:
            self._adopt_order(ready)

    def _was_discarded(self) -> bool:
        """Return True if another rank took this round for one it had to discard."""
        return (
            bool(self._buckets) and not self._buckets[-1].reads_flags_late and self._buckets[-1].any_rank_set(DISCARDS)
        )

    def _launch_rest_and_wait(self, flag: int = CONTRIBUTES) -> None:
        while self._next_bucket < len(self._buckets):
            self._launch_next(flag)
        began = time.monotonic()
        for bucket in self._buckets:
            bucket.wait()
        if self.group.wait_times is not None and self._buckets:
            self.group.wait_times.record_gradient_reduction(began)

    def _must_rebuild_buckets(self) -> bool:
        """Return True after the first round without joined ranks."""
        if self._num_layouts > 1 or self._fused_groups or self._config.op == "adasum" or not self._buckets:
            return False
        return not self._buckets[0].any_rank_set(HAS_JOINED)

    def _adopt_order(self, ready: Sequence[int]) -> None:
        """Rebuild the buckets in the first rank's order, and the parameters without gradients after it."""
        planned = [number for members in self._members for number in members]
        order = [*ready, *(number for number in planned if number not in set(ready))]
        self._rebuild_buckets(broadcast_object(self._channel, order, 0, f"{self.name}.order"))
        self._reset_round()

    def _assign_grads(self) -> None:
        """Assign the reduced values to the parameters' gradients."""
        all_params = self.params
        for bucket in self._buckets:
            bucket.unpack()
        report = None if self._config.check_every is None else NonFiniteReport()
        if report is not None:
            report.scan(self._buckets, lambda bucket_index, index: all_params[self._members[bucket_index][index]].grad)
        for bucket_index, (bucket, members) in enumerate(zip(self._buckets, self._members, strict=True)):
            params = [all_params[number] for number in members]
            unbucketed = bucket.assign_grads(params)
            for index, as_dense in unbucketed:
                grad = params[index].grad
                params[index].grad = bucket.reduce_unbucketed(index, grad, as_dense=as_dense)
                if report is not None and nonfinite_kinds(params[index].grad):
                    report.add((bucket_index, index), grad)
            self._plan.unbucket(bucket_index, [index for index, _ in unbucketed])
        if report is not None:
            self._record_nonfinite(report)
        if self._config.op == "sum":
            self._last_sums = [weakref.ref(param.grad) for param in all_params if param.grad is not None]
        self._reset_round()

    def _record_nonfinite(self, report: NonFiniteReport) -> None:
        """Record which ranks' gradients were not finite; a second round, in which all are, keeps the first's."""
        found = {
            self._members[bucket][index]: kinds for (bucket, index), kinds in report.exchange(self._channel).items()
        }
        before = self.nonfinite
        self.nonfinite = {n: before[n] if n in before and all(kinds) else kinds for n, kinds in found.items()}
        self.num_reductions += 1
        self.has_joined_ranks = bool(self._buckets) and self._buckets[0].any_rank_set(HAS_JOINED)

    def _reset_round(self) -> None:
        """Forget ready gradients, and replace the buckets whose plan has changed."""
        self._next_bucket = 0
        self._ready.clear()
        for bucket_index, bucket in enumerate(self._buckets):
            bucket.reset()
            bucket.num_pending = sum(self._references[number]() is not None for number in self._members[bucket_index])
            if bucket.plan is not self._plan.buckets[bucket_index]:
                self._buckets[bucket_index] = self._plan.make_bucket(bucket_index, self._channel)


def _live_reducers(group: Group) -> list[Reducer]:
    """Return the reducers that have not been garbage-collected, in the order of creation."""
    return [reducer for plan in group.reducers if (reducer := plan.reducer()) is not None]


def _run_round(group: Group, due: Sequence[Reducer]) -> None:
    """Run the reducers that are due on any rank: Note [several optimizers]."""
    if len(active_plans(group)) > 1:
        flags = torch.zeros(len(group.reducers) + 1, dtype=torch.int32, device="cpu")
        flags[[reducer._number for reducer in due]] = 1
        flags[-1] = 1
        began = time.monotonic()
        allreduce_due_flags(group, flags).wait()
        if group.wait_times is not None:
            group.wait_times.record_flags_wait(began)
        due = [reducer for reducer in _live_reducers(group) if flags[reducer._number]]
    for reducer in due:
        reducer.update()
        reducer._reduce()

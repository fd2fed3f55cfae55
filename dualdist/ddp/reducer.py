"""Reduce gradients during backward(): launch full buckets in the same order on every rank, and finish at its end.

Note [bucket order]: parameters are assigned to buckets last first (parameters.py), and once more, after the first
reduction, in the order in which rank 0's gradients arrived. All ranks must reduce the same buckets in the same order,
but autograd may finish gradients in a different order on each rank, and skip those that a rank's loss does not use. So
a full bucket is launched only after all before it, and the rest when backward ends. A gradient that is None is sent as
zeros with a flag.

Note [several optimizers]: ranks may differ in which of several optimizers a backward touches. So once a session has
several, nothing is launched early: when backward ends the ranks exchange, in one small message, which reducers are
due, and reduce those in the order of their creation.

Note [interrupted backward]: a backward that raises never runs its final callback, while the other ranks wait for the
buckets it had not launched. So the next backward first completes that reduction, with the flag DISCARDS in its last
bucket, which is never launched before a backward ends. All ranks then discard it, whichever backward they took it for:
a rank whose backward raised before anything was launched does not know of it. The gradients stay as they are, and the
next reduction takes them. A backward inside a backward (re-entrant checkpointing) looks the same and is handled the
same; its end reduces once more, which does not change a mean. If only some ranks do this, all raise. If there is no
next backward and the process ends, the others get RankLostError.

Note [interrupts]: an exception of a signal handler, as KeyboardInterrupt, that leaves the wait for the last buckets is
raised once they have come, and the gradients are those of all ranks. The group fails if they do not come within
INTERRUPTED_S, or a second exception comes.

Note [skipped steps]: the others step with these gradients. Whether a rank has stepped since its last reduction is a
flag of the next one, after which all ranks raise unless all or none have: an exception that left step(), or a step that
one rank leaves out as its own loss is NaN, ends with an error on every rank. On a GPU only a rank that left out the
step reads the others' flags, and its error reaches them.

Note [steps in hooks]: a program may step an optimizer in a hook of its gradients, so that no gradient outlives its
backward. Such a step reduces what there is, and the packer packs nothing of the rest of that backward, whose hooks come
later: each calls begin_backward, by which the next step knows that there is more to reduce.

Gradients that were accumulated into the bucket itself are lost with what was sent of them: zero_grad() replaces them,
and without it the group fails. On a GPU the host does not wait to read the others' flags; only a rank that discards a
reduction does. If another rank has taken it for its own, the group fails.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward  # private to torch: tests/unit/test_torch_private_names.py

from dualdist.backends.control_plane import broadcast_object
from dualdist.collectives.broadcast_state import allgather_object
from dualdist.collectives.group import Group
from dualdist.ddp.bucket import Bucket, BucketStrategy
from dualdist.ddp.config import ReducerConfig
from dualdist.ddp.layout import CONTRIBUTES, DISCARDS, HAS_JOINED, IS_NESTED, SKIPPED_STEP
from dualdist.ddp.packer import NO_BACKWARD, assign_grad, current_backward, is_dense, is_view_of, owner_of
from dualdist.ddp.parameters import Errors, ParamRegistry, ParamSource
from dualdist.ddp.rank_checks import require_same_start, require_same_steps
from dualdist.ddp.reduction_plan import DueFlags, active_plans
from dualdist.errors import (
    CollectiveError,
    DualdistError,
    NotInitializedError,
    UnsupportedError,
    UsageError,
)
from dualdist.utils import accelerator

# Seconds in which the buckets must come after an interrupt: Note [interrupts].
INTERRUPTED_S = 10.0


class Reducer:
    """Reduce the gradients of one optimizer's parameters at the end of every `accumulate`-th backward.

    All ranks run the same number of backwards between two steps, with one exception: a rank whose backward uses none
    of the parameters takes part when it steps. The `strategy` says what happens to a full bucket; gradients of each of
    the `fused_groups` share buckets. If the group has been closed, `next_group` returns the one that replaces it, or
    raises. Errors of collectives are raised within the context of `errors`.
    """

    def __init__(
        self,
        group: Group,
        source: ParamSource,
        config: ReducerConfig,
        strategy: type[BucketStrategy],
        accumulate: int,
        *,
        fused_groups: Sequence[Sequence[torch.Tensor]],
        next_group: Callable[[], Group] | None,
        errors: Errors,
    ) -> None:
        self.config = config
        self.accumulate = accumulate
        self.errors = errors
        # With check_every: kinds by rank for each parameter whose gradient is not finite, the number of reductions, and
        # whether some ranks had joined in the last one.
        self.nonfinite: dict[int, list[int]] = {}
        self.num_reductions = 0
        self.has_joined_ranks = False
        self.sent_bytes = 0  # of gradients, without flags, that this rank gave to the last reduction
        self.registry = ParamRegistry(self, group, source, config, strategy, fused_groups, errors)
        self.packer = self.registry.packer
        self._next_group = next_group
        # Gradients become views of the buckets; not where a report may need those before the reduction.
        self._assigns_views = config.gradient_as_bucket_view and config.check_every is None
        self._lock = threading.RLock()  # autograd runs the hooks of each device in a separate thread
        self._is_nested = False  # the last backward began inside of another
        self._interrupt: BaseException | None = None  # Note [interrupts]
        self._backward_thread: int | None = None  # until its end
        self._has_stepped = True  # since the last reduction: Note [skipped steps]
        self._stepped_in = NO_BACKWARD  # the last backward that was left by a step: Note [steps in hooks]
        self._has_later_gradients = False  # gradients of that backward came after the step
        self._last_sums: list[weakref.ref[torch.Tensor]] = []  # the gradients assigned last, with op="sum"
        self._begin()

    def _begin(self) -> None:
        """Begin in a group."""
        self._channel = self.registry.channel
        self._next_bucket = 0  # the first that has not been launched
        self._num_backwards = 0  # since the last reduction
        self._num_since_step = 0  # reductions since the last step
        self._has_reduced = self._must_compare = self._must_compare_steps = False
        self._was_compared = not self.config.compares_start or self.config.check_every is not None

    @property
    def group(self) -> Group:
        return self.registry.group

    @property
    def name(self) -> str:
        return self.registry.name

    @property
    def number(self) -> int:
        return self.registry.number

    def give_up(self, param: torch.Tensor) -> None:
        self.registry.give_up(param)

    def move_to_group(self, group: Group) -> None:
        """Reduce in another group; every rank of it calls this or creates a reducer. `next_group` takes precedence."""
        self.registry.move_to_group(group if self._next_group is None else self._next_group())
        self._begin()
        self.update()

    def update(self) -> None:
        """Register parameters that were added or unfrozen since the last call; every rank calls this.

        Raises:
            MismatchError: the ranks' parameters or configurations differ; raised on every rank.
        """
        self._require_open()
        self.registry.update(self.accumulate)

    def _require_open(self) -> None:
        if self.group.is_open:
            return
        if self._next_group is None:
            raise NotInitializedError(
                "this optimizer reduced gradients in a group that dd.shutdown() or dd.remove_group() has closed: call "
                "dd.wrap_optimizer again"
            )
        self.registry.move_to_group(self._next_group())
        self._begin()

    def synchronize(self) -> None:
        """Reduce now, however many backwards have run, unless they have been reduced already.

        Inside of a backward more gradients may have come since the last reduction, also of a step of it.
        """
        self._require_open()
        self._is_nested = False
        backward = current_backward()
        is_inside = backward != NO_BACKWARD
        if is_inside:
            # Not in the step of a base class, which a step calls: Note [steps in hooks].
            is_due = backward != self._stepped_in or self._has_later_gradients
        else:
            is_due = self._num_since_step == 0 or self._num_backwards > 0
        if is_due:
            with self.errors(), self._channel.failing("reduction of gradients"):
                if not (is_inside and self.packer.is_open(backward)):
                    self.discard_interrupted()
                self.packer.close_all()
                self._stepped_in, self._has_later_gradients = backward, False
                _reduce_due(self.group, [self], is_inside=is_inside)
            self._raise_interrupt()

    def end_join(self) -> None:
        """Compare no step with those during a join, which only some ranks took: Note [skipped steps]."""
        self._has_stepped = True

    def finish_step(self) -> None:
        """Begin the next step: the parameters have been updated."""
        self._has_stepped = True
        self.reset_step()

    def reset_step(self) -> None:
        """Begin the next step: the gradients have been used or cleared."""
        self._num_since_step = self._num_backwards = 0
        self.nonfinite = {}

    def prepare_zero_grad(self) -> None:
        """Take the gradients of a backward that raised out of the buckets, which are still being reduced."""
        if self._next_bucket:
            self.registry.keep_grads()

    def set_order(self, order: Sequence[int]) -> None:
        """Rebuild the buckets in the order of another run; every rank calls this, between two steps.

        Sums over more than two ranks depend, in the last bit, on the position of a gradient in its bucket.
        """
        if self.registry.has_fixed_order:
            return
        if order != self.registry.order and sorted(order) == list(range(len(self.registry.owned))):
            # An interrupted backward may have got further on some ranks than on others.
            launched = allgather_object(self.group, self._next_bucket)
            with self.errors(), self._channel.failing("reduction of gradients"):
                if any(launched):
                    self._discard()
                self._adopt_order(order)

    def begin_backward(self, backward: int) -> None:
        """Begin a reduction; the packer calls this at the first gradient of a backward."""
        with self._lock, self.errors(), self._channel.failing("reduction of gradients"):
            if self.packer.is_open(backward):  # by a hook of another device
                return
            if backward == self._stepped_in:
                self.packer.packs = False
                self._has_later_gradients = True
                return
            self._require_open()
            if self.registry.is_on_accelerator:
                self._refuse_capture()
            has_one_plan = len(active_plans(self.group)) == 1
            if not has_one_plan:
                self._require_one_thread()
            self.discard_interrupted()
            if has_one_plan:  # else in _reduce_due, once the ranks know which reducers are due
                self.update()
            self._is_nested = _count_running_backwards() > 1
            self.packer.packs = self._num_backwards + 1 >= self.accumulate
            self.packer.launches_early = has_one_plan
            self.packer.open(backward)
            Variable._execution_engine.queue_callback(partial(self._end_backward, backward))

    def _refuse_capture(self) -> None:
        """Raise UnsupportedError while the current stream is captured into a graph."""
        devices = {layout.device for layout in self.registry.plan.layouts}
        if any(map(accelerator.is_capturing, devices)):
            raise UnsupportedError(
                "backward() of a wrapped optimizer's parameters cannot be captured in a graph of the device: a replay "
                "would not exchange which gradients each rank has. make_graphed_callables captures the model's own "
                "work, and leaves the reduction outside"
            )

    def _require_one_thread(self) -> None:
        """Raise CollectiveError if another thread is in a backward: each rank would have an order of its own."""
        self._backward_thread = thread = threading.get_ident()
        others = {other._backward_thread for other in _live_reducers(self.group)} - {None, thread}
        if not others.isdisjoint(each.ident for each in threading.enumerate()):
            raise CollectiveError(
                "two threads run backward() of wrapped optimizers at the same time, so that each rank would reduce "
                "their gradients in an order of its own: run one after the other"
            )

    def on_bucket_ready(self) -> None:
        """Launch the buckets that are full, up to the first that is not; the packer calls this when one is."""
        with self._lock, self.errors(), self._channel.failing("reduction of gradients"):
            while self._next_bucket < len(self.registry.buckets) - 1 and self.packer.pending(self._next_bucket) == 0:
                self._launch_next()
            if not self.registry.is_on_accelerator:  # where the current stream would wait
                self._channel.advance()

    def refuse_gradient(self, number: int) -> None:
        """Raise for a gradient whose dtype or device is not that of its bucket."""
        param = self.registry.all_params[number]
        grad = torch.empty(0) if param.grad is None else param.grad
        name = next((name for name, known in self.registry.source.named() if known is param), f"parameter {number}")
        raise UsageError(
            f"the gradient of {name} is {grad.dtype} on {grad.device} now: the model was converted or moved after "
            "dd.wrap_optimizer; convert it before"
        )

    def _launch_next(self, flag: int = CONTRIBUTES) -> None:
        index = self._next_bucket
        bucket, grads = self.registry.buckets[index], None
        if not self.packer.pack_rest(index):
            grads = [None if param is None else param.grad for param in self.registry.members(bucket)]
        more_flags = [IS_NESTED] * self._is_nested + [SKIPPED_STEP] * (not self._has_stepped)
        bucket.launch(grads, flag, more_flags)
        self._next_bucket += 1

    def _end_backward(self, backward: int) -> None:
        """Reduce what is due; every reducer of the backward is called, and the first does it for all."""
        due = [reducer for reducer in _live_reducers(self.group) if reducer._count_backward(backward)]
        if due:
            try:
                with self.errors(), self._channel.failing("reduction of gradients"):
                    _reduce_due(self.group, due)
                for reducer in due:
                    reducer._raise_interrupt()
            finally:
                for reducer in due:
                    reducer._backward_thread = None

    def _count_backward(self, backward: int) -> bool:
        """Count the end of a backward; return True if this reducer took part and is due."""
        with self._lock:
            if not self.packer.is_open(backward):
                return False
            self.packer.close_all()  # the others were interrupted
            self._num_backwards += 1
            is_due = self._num_backwards >= self.accumulate
            if not is_due:
                self._backward_thread = None
            return is_due

    def discard_interrupted(self) -> None:
        """Complete and discard the reduction of a backward that raised: Note [interrupted backward]."""
        if self._next_bucket == 0:
            self._reset()
        else:
            self._discard()

    def _discard(self) -> None:
        """Complete the current reduction on all ranks, leaving the gradients as they are."""
        self._require_gradients_outside()
        self._launch_rest_and_wait(DISCARDS)
        last = self.registry.buckets[-1]
        if last.reads_flags_late and last.any_rank_set(CONTRIBUTES):
            raise CollectiveError(
                "a backward raised on this rank after part of its gradients had been sent, and another rank has used "
                "them as those of its own backward: resume from a checkpoint"
            )
        self._reset()

    def _require_gradients_outside(self) -> None:
        """Raise CollectiveError if a gradient was accumulated into a bucket that has been sent."""
        if any(
            is_view_of(param.grad, view)
            for param, view in self.registry.places(self.registry.buckets[: self._next_bucket])
        ):
            raise CollectiveError(
                "a backward raised on some rank after gradients had been sent from where they are, in the buckets: "
                "after an exception call zero_grad() before the next backward, or pass gradient_as_bucket_view=False "
                "to dd.wrap_optimizer"
            )

    def _reduce(self) -> None:
        """Reduce all gradients and assign the results."""
        if self.config.op == "sum" and self._num_since_step and self._holds_last_sums():
            raise UsageError(
                "a second backward before step() would add up again what is the sum over all ranks already: call "
                "zero_grad() in between, use accumulate=k for k backwards a step, or op='mean'; where "
                "torch.utils.checkpoint(use_reentrant=True) runs that backward, pass use_reentrant=False"
            )
        with self._lock:
            self._finish()
            self._num_backwards = 0
            self._num_since_step += 1
            self.group.gradient_reductions += 1
            was_first, self._has_reduced = not self._has_reduced, True
            has_stepped, self._has_stepped = self._has_stepped, False
            if self._must_compare_steps:
                require_same_steps(self.registry, has_stepped=has_stepped)
            if self._must_compare:
                self._must_compare, self._was_compared = False, True
                require_same_start(self.registry, was_first=was_first)

    def _holds_last_sums(self) -> bool:
        """Return True if a parameter's gradient is still the tensor of the last sum."""
        sums = {id(grad) for reference in self._last_sums if (grad := reference()) is not None}
        return any(id(param.grad) in sums for param in self.registry.all_params)

    def _finish(self) -> None:
        ready = self.packer.order()
        if len(ready) < len(self.registry.owned):
            self._require_hooks(ready)
        self._launch_rest_and_wait()
        reads_flags = bool(self.registry.buckets) and not self.registry.buckets[-1].reads_flags_late
        while reads_flags and self.registry.buckets[-1].any_rank_set(DISCARDS):
            self._require_gradients_outside()
            self._reset()
            self._launch_rest_and_wait()
        differing = self.registry.buckets[-1].differing_flags() if reads_flags or not self._has_stepped else []
        if IS_NESTED in differing:
            raise CollectiveError(
                "some ranks reduce the gradients of a backward inside of another, as of "
                "torch.utils.checkpoint(use_reentrant=True), and others do not: use it on every rank equally often, or "
                "pass use_reentrant=False"
            )
        self._must_compare_steps = SKIPPED_STEP in differing
        if not self._was_compared and self.registry.buckets:
            self._must_compare = not self.registry.buckets[0].any_rank_set(HAS_JOINED)
        must_rebuild = self._must_rebuild_buckets()
        self._assign_grads()
        if must_rebuild:
            self._adopt_order(ready)
        if self.config.op == "sum":
            self._last_sums = [weakref.ref(param.grad) for param in self.registry.all_params if param.grad is not None]

    def _launch_rest_and_wait(self, flag: int = CONTRIBUTES) -> None:
        while self._next_bucket < len(self.registry.buckets):
            self._launch_next(flag)
        began = time.monotonic()
        for bucket in self.registry.buckets:
            self._wait(bucket)
        if self.group.wait_times is not None and self.registry.buckets:
            self.group.wait_times.record_gradient_reduction(began)

    def _wait(self, bucket: Bucket) -> None:
        """Wait for a bucket; finish, too, where an exception of a signal handler leaves the wait: Note [interrupts]."""
        try:
            bucket.wait()
        except DualdistError:
            raise
        except BaseException as interrupt:
            for each in self.registry.buckets:
                each.limit_wait(INTERRUPTED_S)
            try:
                bucket.wait()
            except BaseException as error:
                raise interrupt from error
            self._interrupt = self._interrupt or interrupt

    def _raise_interrupt(self) -> None:
        """Raise what interrupted a wait, now that the gradients are those of all ranks."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def _must_rebuild_buckets(self) -> bool:
        """Return True after the first reduction without joined ranks."""
        registry = self.registry
        if registry.order is not None or registry.has_fixed_order or not registry.buckets:
            return False
        return not registry.buckets[0].any_rank_set(HAS_JOINED)

    def _require_hooks(self, ready: Sequence[int]) -> None:
        """Raise UsageError if a parameter's gradient came without its hook, which torch drops in a conversion."""
        for number in set(range(len(self.registry.owned))).difference(ready):
            param = self.registry.owned[number]
            if param is not None and param.requires_grad and param.grad is not None and owner_of(param) is not self:
                self.refuse_gradient(number)

    def _adopt_order(self, ready: Sequence[int]) -> None:
        """Rebuild the buckets in the first rank's order, and the parameters without gradients after it."""
        known = set(ready)
        order = [*ready, *(number for number in self.registry.planned_order() if number not in known)]
        name = f"{self.name}.order"
        self.registry.rebuild_buckets(
            self._channel.run(name, lambda backend: broadcast_object(backend, order, 0, name))
        )
        if self._assigns_views:
            for param, view in self.registry.places(self.registry.buckets):
                if param.grad is not None and is_dense(param.grad):
                    assign_grad(param, view.copy_(param.grad), as_views=True)
        self._reset()

    def _assign_grads(self) -> None:
        """Make the reduced values the parameters' gradients."""

        def assign(index: int, bucket: Bucket) -> list[tuple[int, bool]]:
            if bucket.are_all_dense():
                self.packer.assign_grads(index, self._assigns_views)
                return []
            return bucket.assign_special_grads(self.registry.members(bucket), as_views=self._assigns_views)

        found = self.registry.plan.finish(self.registry.buckets, self._channel, assign, self.registry.members)
        self.sent_bytes = sum(bucket.sent_bytes for bucket in self.registry.buckets)
        if self.config.check_every is not None:
            before = self.nonfinite  # a second reduction, in which all ranks' are not finite, keeps the first's kinds
            self.nonfinite = {n: before[n] if n in before and all(kinds) else kinds for n, kinds in found.items()}
            self.num_reductions += 1
            self.has_joined_ranks = bool(self.registry.buckets) and self.registry.buckets[0].any_rank_set(HAS_JOINED)
        self._reset()

    def _reset(self) -> None:
        """Forget which gradients are ready, and replace the buckets whose plan has changed."""
        self._next_bucket = 0
        self.packer.reset()
        self.registry.replace_buckets()


def _live_reducers(group: Group) -> list[Reducer]:
    """Return the reducers that have not been garbage-collected, in the order of creation."""
    return [reducer for plan in group.reducers if (reducer := plan.reducer()) is not None]


def _reduce_due(group: Group, due: Sequence[Reducer], *, is_inside: bool = False) -> None:
    """Run the reducers that are due on any rank: Note [several optimizers]; `is_inside` of a backward, of its hook."""
    own = due
    if len(active_plans(group)) > 1:
        began = time.monotonic()
        numbers = DueFlags(group, [reducer.number for reducer in due]).wait()
        if group.wait_times is not None:
            group.wait_times.record_flags_wait(began)
        due = [reducer for reducer in _live_reducers(group) if reducer.number in numbers]
        if is_inside and due != own:
            raise CollectiveError(
                "step() in a hook of backward(), where other ranks step another optimizer: their gradients come in "
                "another order. Step after backward(), or wrap one optimizer of all parameters"
            )
    for reducer in due:
        if reducer not in own:
            reducer.discard_interrupted()
        reducer.update()
        reducer._reduce()


def _count_running_backwards() -> int:
    """Return how many backwards of this thread are inside of each other, which torch tells nobody but in its frames."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back  # type: ignore[assignment]
    return count

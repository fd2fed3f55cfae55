"""When gradients are reduced: at the end of a backward, bucket by bucket, in the same order on every rank."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from dualdist.backends.base import UNRESERVED
from dualdist.backends.control_plane import broadcast_object, check_same_tensors
from dualdist.collectives.objects import allgather_object
from dualdist.ddp.bucket_plan import (
    DROPS,
    HAS_JOINED,
    TAKES_PART,
    BucketPlan,
    ReducerConfig,
    dense_strides,
    plan_buckets,
    wire_dtype,
)
from dualdist.ddp.buckets import Bucket
from dualdist.ddp.flat_buffer import refuse_capture
from dualdist.ddp.grad_hooks import GradHook, owner_of, released, remove_hooks
from dualdist.ddp.nonfinite import NonFiniteReport, nonfinite_kinds
from dualdist.ddp.reduction_plan import ReductionPlan, active_plans, allreduce_due_flags, retire_unused
from dualdist.errors import CollectiveError, NotInitializedError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from dualdist.backends.base import Backend
    from dualdist.collectives.group import Group

_current_backward = torch._C._current_graph_task_id
Errors = Callable[[], contextlib.AbstractContextManager[Any]]

# Note [bucket order]: all ranks must reduce the same buckets in the same order, but autograd may finish gradients in
# another order on each rank, and skip those that a rank's loss does not touch. So a full bucket leaves only after all
# before it. What has not left when backward ends leaves then; a gradient that is None travels as zeros beside a flag
# that says so.
#
# Note [several optimizers]: which of them a backward touches may differ between ranks too. So once a session has
# several, nothing leaves early: when backward ends the ranks tell each other, in one small message, which ones are due,
# and reduce those in the order in which they were wrapped.
#
# Note [interrupted backward]: a backward that raises never runs its callback. The other ranks still wait for what it
# had not sent, so the next backward first completes that round, and says so in its last bucket, which never leaves
# before a backward ends. Then all ranks drop the round, whatever they took it for: one whose backward raised before it
# had sent anything knows of none, and another's raised not at all. The gradients stay as they are, and the new round
# reduces them. A backward inside a backward (re-entrant checkpointing) looks the same and gets the same treatment; its
# end reduces once more, which for a mean leaves what is reduced already as it is.
#
# On a GPU the program does not wait to read what other ranks say: only one that drops a round does. Where another has
# taken that round for its own, the group ends.
#
# Note [who keeps whom]: a parameter keeps its hook, and the hook the reducer: gradients are reduced for as long as
# there are any, on every rank alike, whatever became of the optimizer. Python's collector does not see a parameter's
# hooks, so nothing that a reducer keeps may keep a parameter: else a model that was dropped would never be freed.


class Reducer:
    """Reduces the gradients of one optimizer's parameters at the end of every `accumulate`-th backward.

    All ranks run the same number of backwards between two steps, with one exception: a rank whose backward touches none
    of the parameters takes part when it steps. Where the group has been closed, `next_group` finds the one that takes
    its place, or raises. What fails between ranks is raised through `errors`.
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
        self.accumulate = accumulate
        self.is_suspended = False  # backwards are none of the other ranks' business
        self._parameters = parameters
        self.named_parameters = named_parameters
        self._config = config
        self._fused_groups = [[weakref.ref(param) for param in members] for members in fused_groups]
        self._next_group = next_group
        self.errors = errors
        self._lock = threading.RLock()  # autograd runs the hooks of each device in a thread of its own
        self._arrived: dict[int, bool] = {}  # in the order in which they did
        self._next = 0  # the first bucket that has not been launched
        self._backwards_open: set[int] = set()  # autograd's numbers of the backwards whose end is awaited
        self._backwards = 0  # since the last reduction
        self._rounds_done = 0  # since the last step
        self._sums: list[weakref.ref[torch.Tensor]] = []  # the gradients that were put back last
        # With check_every: of parameters whose gradients are not finite the kinds by rank, how often has been reduced,
        # and whether some ranks had joined then.
        self.blamed: dict[int, list[int]] = {}
        self.reductions = 0
        self.some_have_joined = False
        self._enter(group)

    def _enter(self, group: Group) -> None:
        """Begin in this group, which has no place in its plans for the parameters yet."""
        self.group = group
        self._line: Backend = group.gradients
        self.name = group.next_name("gradients")
        self._seen: list[weakref.ref[torch.Tensor]] = []  # the parameters at the last look
        self._seen_wants: list[bool] = []
        self._references: list[Callable[[], torch.Tensor | None]] = []
        self._numbers: dict[int, int] = {}  # id of a parameter -> its place among them
        self._buckets: list[Bucket] = []
        self._members: list[tuple[int, ...]] = []  # of each bucket
        self._plans = 1
        self._bucket_of: list[int] = []
        self._seat_of: list[int] = []  # its place in the bucket
        self._arrived.clear()
        self._backwards_open.clear()
        self._next = self._backwards = self._rounds_done = 0
        self._number = len(group.reducers)
        self._rounds = ReductionPlan(self._config, weakref.ref(self))
        group.reducers.append(self._rounds)

    def follow(self, group: Group) -> None:
        """Reduce in this group, which may have other ranks; every one of them calls this, or makes a reducer.

        Whoever says where to find the next group goes before.
        """
        self._enter(group if self._next_group is None else self._next_group())
        self.update()

    @property
    def number(self) -> int:
        """Of the reducers of its group it is the one that every rank made so late."""
        return self._number

    def detach(self) -> None:
        """The parameters' gradients are none of this reducer's business any more."""
        for param in self.params:
            remove_hooks(param, self)
        self._rounds.is_over = True
        if self.group.is_open:
            drop(self._buckets)
        self._rounds.clear()
        self._members.clear()
        self._buckets.clear()
        if self.group.reducers[-1] is self._rounds:
            self.group.reducers.pop()  # whoever takes its place is not one of several

    def update(self) -> None:
        """Reduce also those parameters that are new, or want gradients, since the last look; every rank calls this.

        MismatchError on every rank where the ranks' parameters, or what shall happen to their gradients, differ.
        """
        self._require_open()
        params = self._parameters()
        wants = [param.requires_grad for param in params]
        if wants == self._seen_wants and all(map(operator.is_, [see() for see in self._seen], params)):
            return
        self._seen, self._seen_wants = [weakref.ref(param) for param in params], wants
        fresh = [(name, param) for name, param in self.named_parameters() if self._is_unowned(param)]
        if fresh:
            self._register_params(fresh)

    def _register_params(self, fresh: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, param in fresh:
            if param.layout is not torch.strided:
                raise UnsupportedError(f"parameter {name} has the layout {param.layout}: only dense ones are reduced")
        start = len(self._references)
        numbers = {id(param): number for number, (_, param) in enumerate(fresh, start)}
        fused_groups = [[numbers[id(p)] for ref in refs if id(p := ref()) in numbers] for refs in self._fused_groups]
        words = f"{self._config.words} accumulate={self.accumulate}" + (
            f" groups={fused_groups}" if fused_groups else ""
        )
        laid_out = [(name if p.is_contiguous() else f"{name} strides {p.stride()}", p) for name, p in fresh]
        with self.errors():
            check_same_tensors(self._line, laid_out, 0, f"{self.name}.check", words)
            retire_unused(self.group)
        self._numbers.update(numbers)
        self._references.extend(weakref.ref(param) for _, param in fresh)
        self._bucket_of.extend([-1] * len(fresh))
        self._seat_of.extend([-1] * len(fresh))
        for _, param in fresh:
            self._own(param, numbers[id(param)])
        params = self.params
        # Autograd finishes the last layers first.
        for members in plan_buckets(params, range(len(params) - 1, start - 1, -1), self._config, fused_groups):
            self._add_bucket(members, params)

    @property
    def params(self) -> list[torch.Tensor]:
        """What is reduced; in place of a parameter that was dropped, one of its shape."""
        params = [reference() for reference in self._references]
        if all(map(operator.is_not, params, itertools.repeat(None))):
            return params  # type: ignore[return-value]
        for place, members in enumerate(self._members):
            plan = self._rounds.buckets[place]
            for number, shape in zip(members, plan.shapes, strict=True):
                if params[number] is None:
                    params[number] = torch.empty(shape, dtype=plan.dtype, device=plan.device)
        return [param for param in params if param is not None]

    def _is_unowned(self, param: torch.Tensor) -> bool:
        """Whether the parameter wants gradients that neither this reducer nor a newer one reduces."""
        if not param.requires_grad or self._number_of(param) is not None:
            return False
        owner = owner_of(param)
        return owner in (None, self) or owner.group is not self.group or owner._number < self._number

    def parameter(self, number: int) -> torch.Tensor | None:
        """The one of this number, unless it was dropped."""
        return self._references[number]()

    def _number_of(self, param: torch.Tensor) -> int | None:
        number = self._numbers.get(id(param))
        return number if number is not None and self._references[number]() is param else None

    def _add_bucket(self, members: tuple[int, ...], all_params: Sequence[torch.Tensor]) -> None:
        place, params = len(self._buckets), [all_params[number] for number in members]
        for seat, number in enumerate(members):
            self._bucket_of[number], self._seat_of[number] = place, seat
        dtype, device = params[0].dtype, params[0].device
        apart = frozenset(range(len(members))) if self._config.op == "adasum" else frozenset()
        shapes, strides = tuple(param.shape for param in params), tuple(dense_strides(param) for param in params)
        plan = BucketPlan(f"{self.name}.{self._plans}.{place}", shapes, strides, dtype, device, UNRESERVED, apart)
        # What Adasum's buckets carry is no gradients: nothing is compressed.
        wire = dtype if self._config.op == "adasum" else wire_dtype(dtype, self._config)
        if wire is not None and wire in self._line.supported_reduce_dtypes:
            plan = replace(plan, place=self._line.reserve(plan.length * wire.itemsize, device))
        self._rounds.buckets.append(plan)
        self._members.append(members)
        self._buckets.append(self._rounds.bucket(place, self._line))

    def _shall_plan_anew(self) -> bool:
        """Whether this was the first round in which no rank had joined; after the buckets have arrived."""
        if self._plans > 1 or self._fused_groups or self._config.op == "adasum" or not self._buckets:
            return False
        return not self._buckets[0].any_rank_set(HAS_JOINED)

    def _plan_anew(self, arrived: Sequence[int]) -> None:
        """Once, after the first round: the order in which gradients arrived on the first rank is that of all ranks."""
        planned = [number for members in self._members for number in members]
        mine = [*arrived, *(number for number in planned if number not in set(arrived))]
        order = broadcast_object(self._line, mine, 0, f"{self.name}.order")
        self._plans += 1
        params = self.params
        all_members = plan_buckets(params, order, self._config)
        if all_members == self._members:
            return
        apart = {
            members[seat]
            for members, plan in zip(self._members, self._rounds.buckets, strict=True)
            for seat in plan.apart
        }
        drop(self._buckets)
        self._buckets.clear()
        self._members.clear()
        self._rounds.clear()
        for place, members in enumerate(all_members):
            self._add_bucket(members, params)
            self._rounds.set_apart(place, [seat for seat, number in enumerate(members) if number in apart])
        self._forget()

    @property
    def order(self) -> list[int] | None:
        """The numbers of the parameters as they travel, where that is settled."""
        return [number for members in self._members for number in members] if self._plans > 1 else None

    def settle_order(self, order: Sequence[int]) -> None:
        """Gradients travel in this order, another run's, from now on; every rank calls this, between two steps.

        Sums over more than two ranks depend, in their last bit, on where a gradient lies in its bucket.
        """
        if self._fused_groups or self._config.op == "adasum":  # which have one order only: that of their wrapping
            return
        if order != self.order and sorted(order) == list(range(len(self._references))):
            # A backward that raised may have got further on some ranks than on others.
            launched = allgather_object(self.group, self._next)
            with self.errors(), self.group.fail_on_error():
                if any(launched):
                    self._drop_round()
                self._plan_anew(order)

    def synchronize(self) -> None:
        """The gradients are reduced, whatever the number of backwards since the last time."""
        self._require_open()
        if self._rounds_done == 0 or self._backwards:
            with self.errors(), self.group.fail_on_error():
                _run_round(self.group, [self])

    def reset_step(self) -> None:
        """The gradients have been used, or dropped."""
        self._rounds_done = self._backwards = 0
        self.blamed = {}

    def _own(self, param: torch.Tensor, number: int) -> None:
        """Hear of this parameter's gradients; an optimizer that had it before hears no more, and reduces it no more."""
        former = owner_of(param)
        if former not in (None, self):
            former._give_up(param)
        remove_hooks(param)
        param.register_post_accumulate_grad_hook(GradHook(self, number))

    def _give_up(self, param: torch.Tensor) -> None:
        number = self._number_of(param)
        if number is not None:
            self._references[number] = released
            del self._numbers[id(param)]
            self._buckets[self._bucket_of[number]].waiting_for -= 1

    def on_grad_ready(self, param: torch.Tensor, number: int) -> None:
        """Autograd has finished the gradient of this parameter, which has this number here."""
        with self._lock:
            if self.is_suspended:
                return
            backward = _current_backward()
            if backward not in self._backwards_open:
                with self.errors(), self.group.fail_on_error():
                    self._begin_backward(backward)
                number = self._numbers.get(id(param), number)  # a new group numbers anew
            if self._backwards + 1 < self.accumulate or number in self._arrived:
                return
            self._arrived[number] = True
            bucket = self._buckets[self._bucket_of[number]]
            if bucket.streams is not None:
                bucket.streams.note()
            seat = self._seat_of[number]
            if seat in bucket.large:
                bucket.pack(seat, param.grad)
            bucket.waiting_for -= 1
            if bucket.waiting_for == 0 and len(active_plans(self.group)) == 1:
                with self.errors(), self.group.fail_on_error():
                    self._launch_full()

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) - 1 and self._buckets[self._next].waiting_for == 0:
            self._launch_next()
        for bucket in self._buckets[: self._next]:
            bucket.done()  # where transports go on only when they are looked at

    def _launch_next(self, flag: int = TAKES_PART) -> None:
        params = [self._references[number]() for number in self._members[self._next]]
        self._buckets[self._next].launch([None if param is None else param.grad for param in params], flag)
        self._next += 1

    def _begin_backward(self, backward: int) -> None:
        self._require_open()
        if any(bucket.streams is not None for bucket in self._buckets):
            refuse_capture()
        self.drop_interrupted()
        if len(active_plans(self.group)) == 1:  # else the ranks do so when they know which ones are due
            self.update()
        self._backwards_open.add(backward)
        Variable._execution_engine.queue_callback(lambda: self._end_backward(backward))

    def _end_backward(self, backward: int) -> None:
        """Reduce what is due. Every reducer that the backward touched is asked to; the first one does it for all."""
        due = [reducer for reducer in _live(self.group) if reducer._has_ended(backward)]
        if due:
            with self.errors(), self.group.fail_on_error():
                _run_round(self.group, due)

    def drop_interrupted(self) -> None:
        """Complete a round that a backward began before it raised, and drop it: Note [interrupted backward]."""
        if self._next == 0:
            self._forget()
        else:
            self._drop_round()

    def _drop_round(self) -> None:
        """Complete the round that is under way, on all ranks, and leave the gradients as they are."""
        self._complete(DROPS)
        last = self._buckets[-1]
        if last.reads_late and last.any_rank_set(TAKES_PART):
            raise CollectiveError(
                "a backward raised on this rank when part of its gradients had been sent, and another rank has taken "
                "them for those of its own: go on from a checkpoint"
            )
        self._forget()

    def _has_ended(self, backward: int) -> bool:
        """Note that the backward has ended; whether this reducer took part in it and is due."""
        with self._lock:
            if backward not in self._backwards_open:
                return False
            self._backwards_open.clear()  # those that have not ended by now were interrupted
            self._backwards += 1
            return self._backwards >= self.accumulate

    def _reduce(self) -> None:
        """Reduce all gradients, and put them back."""
        if self._config.op == "sum" and self._rounds_done and self._adds_up():
            raise UsageError(
                "a second backward before step() would add up again what is the sum over all ranks already: call "
                "zero_grad() in between, use accumulate=k for k backwards a step, or op='mean'"
            )
        with self._lock:
            self._finish_round()
            self._backwards = 0
            self._rounds_done += 1
            self.group.rounds += 1

    def _adds_up(self) -> bool:
        """Whether a parameter's gradient is the tensor that holds the last sum, and what was added since."""
        sums = {id(grad) for reference in self._sums if (grad := reference()) is not None}
        return any(id(param.grad) in sums for param in self.params)

    def _finish_round(self) -> None:
        """Everything has been reduced and put back, and after the first time planned anew."""
        arrived = list(self._arrived)
        self._complete()
        while self._is_dropped():
            self._forget()
            self._complete()
        shall_plan = self._shall_plan_anew()
        self._put_back()
        if shall_plan:
            self._plan_anew(arrived)

    def _is_dropped(self) -> bool:
        """Whether another rank has completed an interrupted round by the one that has arrived."""
        return bool(self._buckets) and not self._buckets[-1].reads_late and self._buckets[-1].any_rank_set(DROPS)

    def _complete(self, flag: int = TAKES_PART) -> None:
        """Launch what has not left yet, and wait for everything."""
        while self._next < len(self._buckets):
            self._launch_next(flag)
        began = time.monotonic()
        for bucket in self._buckets:
            bucket.wait()
        if self.group.wait_times is not None and self._buckets:
            self.group.wait_times.record_round(began)

    def _put_back(self) -> None:
        """What has been reduced becomes the parameters' gradients."""
        all_params = self.params
        for bucket in self._buckets:
            bucket.unpack()
        blame = None if self._config.check_every is None else NonFiniteReport()
        if blame is not None:
            blame.look(self._buckets, lambda place, member: all_params[self._members[place][member]].grad)
        for place, (bucket, members) in enumerate(zip(self._buckets, self._members, strict=True)):
            params = [all_params[number] for number in members]
            apart = bucket.put_back(params)
            for member, as_dense in apart:
                grad = params[member].grad
                params[member].grad = bucket.reduce_apart(member, grad, as_dense=as_dense)
                if blame is not None and nonfinite_kinds(params[member].grad):
                    blame.note((place, member), grad)
            self._rounds.set_apart(place, [member for member, _ in apart])
        if blame is not None:
            self._take_note(blame)
        if self._config.op == "sum":
            self._sums = [weakref.ref(param.grad) for param in all_params if param.grad is not None]
        self._forget()

    def _take_note(self, blame: NonFiniteReport) -> None:
        """Who is to blame for gradients that are not finite; where all ranks are, as in a second round, as before."""
        told = {self._members[place][member]: kinds for (place, member), kinds in blame.shared(self._line).items()}
        before = self.blamed
        self.blamed = {n: before[n] if n in before and all(kinds) else kinds for n, kinds in told.items()}
        self.reductions += 1
        self.some_have_joined = bool(self._buckets) and self._buckets[0].any_rank_set(HAS_JOINED)

    def _forget(self) -> None:
        """No gradient of the present round has arrived yet, and the buckets are as planned."""
        self._next = 0
        self._arrived.clear()
        for place, bucket in enumerate(self._buckets):
            bucket.begin_anew()
            bucket.waiting_for = sum(self._references[number]() is not None for number in self._members[place])
            if bucket.plan is not self._rounds.buckets[place]:
                self._buckets[place] = self._rounds.bucket(place, self._line)

    def _require_open(self) -> None:
        if self.group.is_open:
            return
        if self._next_group is None:
            raise NotInitializedError(
                "this optimizer reduced gradients in a group that dd.shutdown() or dd.remove_group() has closed: call "
                "dd.wrap_optimizer again"
            )
        self._enter(self._next_group())


def drop(buckets: Sequence[Bucket]) -> None:
    """This rank will not use them again."""
    for bucket in buckets:
        bucket.drop()


def _live(group: Group) -> list[Reducer]:
    """The reducers that have not been garbage-collected, in the order in which every rank made them."""
    return [reducer for rounds in group.reducers if (reducer := rounds.reducer()) is not None]


def _run_round(group: Group, due: Sequence[Reducer]) -> None:
    """Reduce those that are due on any rank: Note [several optimizers]."""
    if len(active_plans(group)) > 1:
        flags = torch.zeros(len(group.reducers) + 1, dtype=torch.int32, device="cpu")
        flags[[reducer._number for reducer in due]] = 1
        flags[-1] = 1
        began = time.monotonic()
        allreduce_due_flags(group, flags).wait()
        if group.wait_times is not None:
            group.wait_times.record_flags_wait(began)
        due = [reducer for reducer in _live(group) if flags[reducer._number]]
    for reducer in due:
        reducer.update()
        reducer._reduce()

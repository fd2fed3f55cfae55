"""When gradients are reduced: at the end of a backward, bucket by bucket, in the same order on every rank."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable

from dualdist.backends.base import Work
from dualdist.buckets import Bucket, Recipe, plan_buckets
from dualdist.errors import NotInitializedError, UnsupportedError, UsageError
from dualdist.group import Group
from dualdist.moves import check_same_tensors
from dualdist.reductions import sparse_sum

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
# had not sent, so the next backward first completes that round, and drops the result: the gradients stay as they are,
# and the new round reduces them. A backward inside a backward (re-entrant checkpointing) looks the same and gets the
# same treatment; its end reduces once more, which for a mean leaves what is reduced already as it is.


# Note [sparse gradients]: that a gradient is sparse is known only when it is there, and never to a rank whose loss does
# not touch the parameter. So the ranks tell each other by a flag in the bucket, and what any of them has sparse is
# summed apart, in parameter order, after the buckets. From then on its place in the bucket is empty.


class Reducer:
    """Reduces the gradients of one optimizer's parameters at the end of every `accumulate`-th backward.

    All ranks run the same number of backwards between two steps, with one exception: a rank whose backward touches none
    of the parameters takes part when it steps.
    """

    def __init__(
        self,
        group: Group,
        parameters: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        recipe: Recipe,
        accumulate: int,
        together: Sequence[Sequence[torch.Tensor]] = (),
    ) -> None:
        self.group = group
        self.accumulate = accumulate
        self._line = group.gradients
        self._parameters = parameters
        self._name = group.next_name("gradients")
        self._recipe = recipe
        self._together = together
        self._params: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # id of a parameter -> its place in _params
        self._names: list[str] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: list[int] = []
        self._lock = threading.RLock()  # autograd runs the hooks of each device in a thread of its own
        self._arrived: set[int] = set()
        self._next = 0  # the first bucket that has not been launched
        self._backwards_open: set[int] = set()  # autograd's numbers of the backwards whose end is awaited
        self._backwards = 0  # since the last step
        self._rounds = 0  # of reductions, since the last step
        self._number = len(group.reducers)
        group.reducers.append(weakref.ref(self))

    def update(self) -> None:
        """Reduce also those parameters that are new, or want gradients, since the last look; every rank calls this.

        MismatchError on every rank where the ranks' parameters, or what shall happen to their gradients, differ.
        """
        fresh = [(name, p) for name, p in self._parameters() if p.requires_grad and id(p) not in self._numbers]
        if not fresh:
            return
        words = f"{self._recipe.words} accumulate={self.accumulate}"
        check_same_tensors(self._line, fresh, 0, f"{self._name}.check", words)
        start = len(self._params)
        for number, (name, param) in enumerate(fresh, start):
            if param.layout is not torch.strided:
                raise UnsupportedError(f"parameter {name} has the layout {param.layout}: only dense ones are reduced")
            self._numbers[id(param)] = number
            self._params.append(param)
            self._names.append(name)
            self._own(param, number)
        owner: dict[int, int] = {}
        together = [[self._numbers[id(p)] for p in group if id(p) in self._numbers] for group in self._together]
        for members in plan_buckets(self._params, range(start, len(self._params)), together):
            owner.update(dict.fromkeys(members, len(self._buckets)))
            bucket = Bucket([self._params[member] for member in members], f"{self._name}.{len(self._buckets)}")
            self._buckets.append(bucket)
        self._bucket_of.extend(owner[number] for number in range(start, len(self._params)))

    def before_step(self) -> None:
        """Take part where this rank's backwards reduced nothing since the last step, or left something unreduced."""
        self.synchronize()
        self.start_anew()

    def synchronize(self) -> None:
        """The gradients are reduced, whatever the number of backwards since the last time."""
        self._require_open()
        if self._rounds == 0 or self._backwards % self.accumulate:
            self.update()
            _run_round(self.group, [self])
            self._backwards = 0

    def start_anew(self) -> None:
        """The gradients have been used, or dropped."""
        self._rounds = self._backwards = 0

    def begin_to_follow(self) -> None:
        """Send the first message of a round for a rank that has joined."""
        self._forget()
        self._buckets[0].launch(self._line, self._recipe, takes_part=False)
        self._next = 1

    def followed_begins(self) -> bool:
        """Whether the message that begin_to_follow() sent has met the others'."""
        return self._buckets[0].done()

    def follow(self) -> bool:
        """Go through a round, whose result this rank drops; False where all ranks have joined and there is none."""
        self._buckets[0].wait()
        if self._buckets[0].ranks_taking_part() == 0:
            self._forget()
            return False
        kept = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        self._finish_round(takes_part=False)
        for param, grad in zip(self._params, kept, strict=True):
            param.grad = grad
        return True

    def _own(self, param: torch.Tensor, number: int) -> None:
        """Hear of this parameter's gradients; an optimizer that had it before hears no more."""
        hooks = param._post_accumulate_grad_hooks or {}
        for key, hook in list(hooks.items()):
            if isinstance(hook, _Hook):
                del hooks[key]
        param.register_post_accumulate_grad_hook(_Hook(self, number))

    def _mark(self, param: torch.Tensor, number: int) -> None:
        """Autograd has finished this parameter's gradient."""
        with self._lock:
            backward = torch._C._current_graph_task_id()
            if backward not in self._backwards_open:
                self._begin_backward(backward)
            if (self._backwards + 1) % self.accumulate or number in self._arrived:
                return
            self._arrived.add(number)
            self._buckets[self._bucket_of[number]].waiting_for -= 1
            if len(self.group.reducers) == 1:
                self._launch_full()

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting_for == 0:
            self._buckets[self._next].launch(self._line, self._recipe)
            self._next += 1

    def _begin_backward(self, backward: int) -> None:
        self._require_open()
        if self._next > 0:
            self._complete()  # Note [interrupted backward]
        self._forget()
        self.update()
        self._backwards_open.add(backward)
        Variable._execution_engine.queue_callback(lambda: _end_backward(self.group, backward))

    def _has_ended(self, backward: int) -> bool:
        """Note that the backward has ended; whether this reducer took part in it and is due."""
        with self._lock:
            if backward not in self._backwards_open:
                return False
            self._backwards_open.clear()  # those that have not ended by now were interrupted
            self._backwards += 1
            return self._backwards % self.accumulate == 0

    def _reduce(self) -> None:
        """Reduce all gradients, and put them back."""
        if self._recipe.op == "sum" and self._rounds:
            raise UsageError(
                "a second backward before step() would add up again what is the sum over all ranks already: call "
                "zero_grad() in between, use accumulate=k for k backwards a step, or op='mean'"
            )
        with self._lock:
            self._finish_round(takes_part=True)
            self._rounds += 1
            self.group.rounds += 1

    def _finish_round(self, *, takes_part: bool) -> None:
        self._complete(takes_part=takes_part)
        for place, bucket in enumerate(self._buckets):
            apart = bucket.put_back(self.group.size, self._recipe)
            for member in apart:
                self._reduce_sparse(bucket.params[member], f"{bucket.name}.{member}")
            if not bucket.apart.issuperset(apart):
                self._buckets[place] = Bucket(bucket.params, bucket.name, bucket.apart | set(apart))
        self._forget()

    def _reduce_sparse(self, param: torch.Tensor, name: str) -> None:
        """Replace a gradient that is sparse on some ranks, and sparse or None on others: Note [sparse gradients]."""
        grad = param.grad
        if grad is not None and not grad.is_sparse:
            raise UnsupportedError(
                f"the gradient of {self._names[self._numbers[id(param)]]} is dense here and sparse on another rank: "
                "build the same model on every rank"
            )
        if grad is None:
            shape = (0, *param.shape[1:])
            rows = torch.empty(1, 0, dtype=torch.int64, device=param.device)
            grad = torch.sparse_coo_tensor(rows, param.new_empty(shape), param.shape, check_invariants=False)
        param.grad = sparse_sum(self._line, grad.detach(), self._recipe.op, name)

    def _complete(self, *, takes_part: bool = True) -> None:
        """Launch what has not left yet, and wait for everything."""
        for bucket in self._buckets[self._next :]:
            bucket.launch(self._line, self._recipe, takes_part=takes_part)
        for bucket in self._buckets:
            bucket.wait()

    def _forget(self) -> None:
        """No gradient of the present round has arrived yet."""
        self._next = 0
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.waiting_for = len(bucket.params)

    def _require_open(self) -> None:
        if not self.group.is_open:
            raise NotInitializedError(
                "this optimizer was wrapped before dd.shutdown(): call dd.wrap_optimizer again after dd.init()"
            )


class _Hook:
    """Tells a reducer that autograd has finished one of its parameters' gradients."""

    def __init__(self, reducer: Reducer, number: int) -> None:
        self.reducer = reducer
        self._number = number

    def __call__(self, param: torch.Tensor) -> None:
        self.reducer._mark(param, self._number)


def _live(group: Group) -> list[Reducer]:
    """The reducers that have not been garbage-collected, in the order in which every rank made them."""
    return [reducer for reference in group.reducers if (reducer := reference()) is not None]


def _end_backward(group: Group, backward: int) -> None:
    """Reduce what is due. Every reducer that the backward touched asks for this; the first one does it for all."""
    due = [reducer for reducer in _live(group) if reducer._has_ended(backward)]
    if due:
        _run_round(group, due)


def _run_round(group: Group, due: Sequence[Reducer]) -> None:
    """Reduce those that are due on any rank: Note [several optimizers]."""
    if len(group.reducers) > 1:
        flags = torch.zeros(len(group.reducers) + 1)
        flags[[reducer._number for reducer in due]] = 1
        flags[-1] = 1
        _launch_due(group, flags).wait()
        due = [reducer for reducer in _live(group) if flags[reducer._number]]
    for reducer in due:
        reducer._reduce()


def _launch_due(group: Group, flags: torch.Tensor) -> Work:
    """Tell each other which reducers are due; the last flag says "I take part"."""
    return group.gradients.allreduce_(flags, "max", "gradients.due")


class Follower:
    """A rank that has joined takes part, with zeros, in the others' rounds of gradients.

    The first message of a round is under way all the time: when it arrives, the others have begun a round, or all have
    joined.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._reducers = _live(group)
        self._flags: torch.Tensor | None = None
        self._work: Work | None = None
        self._is_over = not self._reducers
        self._begin()

    def arrived(self) -> bool:
        """Whether the others have begun a round."""
        if self._is_over:
            return False
        return self._work.done() if self._work is not None else self._reducers[0].followed_begins()

    def follow(self) -> None:
        """Go through the round that has begun; waits for its first message if need be."""
        if self._work is None:
            self._is_over = not self._reducers[0].follow()
        else:
            self._work.wait()
            assert self._flags is not None, "the flags are what the work reduces"
            self._is_over = not self._flags[-1]
            for reducer in self._reducers:
                if self._flags[reducer._number]:
                    reducer.begin_to_follow()
                    reducer.follow()
        self._begin()

    def finish(self) -> None:
        """All have joined: the message under way, which all have sent, arrives."""
        while not self._is_over:
            self.follow()

    def _begin(self) -> None:
        if self._is_over:
            return
        if len(self._group.reducers) > 1:
            self._flags = torch.zeros(len(self._group.reducers) + 1)
            self._work = _launch_due(self._group, self._flags)
        else:
            self._reducers[0].begin_to_follow()

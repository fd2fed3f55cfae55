"""When gradients are reduced: at the end of a backward, bucket by bucket, in the same order on every rank."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable

from dualdist.backends.base import Backend
from dualdist.buckets import Bucket, GradientOp, plan_buckets
from dualdist.collectives import check_same_tensors
from dualdist.errors import NotInitializedError, UnsupportedError, UsageError

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


class Reducer:
    """Reduces the gradients of one optimizer's parameters at the end of every `accumulate`-th backward.

    All ranks run the same number of backwards between two steps, with one exception: a rank whose backward touches none
    of the parameters takes part when it steps.
    """

    def __init__(
        self,
        backend: Backend,
        parameters: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        op: GradientOp,
        accumulate: int,
    ) -> None:
        self.backend = backend
        self._parameters = parameters
        self._name = backend.names.next("gradients")
        self._op = op
        self._accumulate = accumulate
        self._params: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # id of a parameter -> its place in _params
        self._names: list[str] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: list[Bucket] = []
        self._lock = threading.RLock()  # autograd runs the hooks of each device in a thread of its own
        self._arrived: set[int] = set()
        self._next = 0  # the first bucket that has not been launched
        self._backwards_open: set[int] = set()  # autograd's numbers of the backwards whose end is awaited
        self._backwards = 0  # since the last step
        self._rounds = 0  # of reductions, since the last step
        self._number = len(backend.reducers)
        backend.reducers.append(weakref.ref(self))

    def update(self) -> None:
        """Reduce also those parameters that are new, or want gradients, since the last look; every rank calls this.

        MismatchError on every rank where the ranks' parameters differ.
        """
        fresh = [(name, p) for name, p in self._parameters() if p.requires_grad and id(p) not in self._numbers]
        if not fresh:
            return
        check_same_tensors(self.backend, fresh, 0)
        start = len(self._params)
        for number, (name, param) in enumerate(fresh, start):
            if param.layout is not torch.strided:
                raise UnsupportedError(f"parameter {name} has the layout {param.layout}: only dense ones are reduced")
            self._numbers[id(param)] = number
            self._params.append(param)
            self._names.append(name)
            self._own(param, number)
        owner: dict[int, Bucket] = {}
        for members in plan_buckets(self._params, range(start, len(self._params))):
            bucket = Bucket([self._params[member] for member in members], f"{self._name}.{len(self._buckets)}")
            self._buckets.append(bucket)
            owner.update(dict.fromkeys(members, bucket))
        self._bucket_of.extend(owner[number] for number in range(start, len(self._params)))

    def before_step(self) -> None:
        """Take part where this rank's backwards reduced nothing since the last step, or left something unreduced."""
        self._require_open()
        if self._rounds == 0 or self._backwards % self._accumulate:
            self.update()
            _run_round(self.backend, [self])
        self.start_anew()

    def start_anew(self) -> None:
        """The gradients have been used, or dropped."""
        self._rounds = self._backwards = 0

    def _own(self, param: torch.Tensor, number: int) -> None:
        """Hear of this parameter's gradients; an optimizer that had it before hears no more."""
        hooks = param._post_accumulate_grad_hooks or {}
        for key, hook in list(hooks.items()):
            if isinstance(hook, _Hook):
                del hooks[key]
        param.register_post_accumulate_grad_hook(_Hook(self, number))

    def _mark(self, param: torch.Tensor, number: int) -> None:
        """Autograd has finished this parameter's gradient."""
        if param.grad is not None and param.grad.is_sparse:
            raise UnsupportedError(
                f"the gradient of {self._names[number]} is sparse, and only dense ones are reduced: "
                "build the embedding with sparse=False"
            )
        with self._lock:
            backward = torch._C._current_graph_task_id()
            if backward not in self._backwards_open:
                self._begin_backward(backward)
            if (self._backwards + 1) % self._accumulate or number in self._arrived:
                return
            self._arrived.add(number)
            self._bucket_of[number].waiting_for -= 1
            if len(self.backend.reducers) == 1:
                self._launch_full()

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting_for == 0:
            self._buckets[self._next].launch(self.backend)
            self._next += 1

    def _begin_backward(self, backward: int) -> None:
        self._require_open()
        if self._next > 0:
            self._complete()  # Note [interrupted backward]
        self._forget()
        self.update()
        self._backwards_open.add(backward)
        Variable._execution_engine.queue_callback(lambda: _end_backward(self.backend, backward))

    def _has_ended(self, backward: int) -> bool:
        """Note that the backward has ended; whether this reducer took part in it and is due."""
        with self._lock:
            if backward not in self._backwards_open:
                return False
            self._backwards_open.clear()  # those that have not ended by now were interrupted
            self._backwards += 1
            return self._backwards % self._accumulate == 0

    def _reduce(self) -> None:
        """Reduce all gradients, and put them back."""
        if self._op == "sum" and self._rounds:
            raise UsageError(
                "a second backward before step() would add up again what is the sum over all ranks already: call "
                "zero_grad() in between, use accumulate=k for k backwards a step, or op='mean'"
            )
        with self._lock:
            self._complete()
            for bucket in self._buckets:
                bucket.put_back(self.backend.size, self._op)
            self._forget()
            self._rounds += 1

    def _complete(self) -> None:
        """Launch what has not left yet, and wait for everything."""
        for bucket in self._buckets[self._next :]:
            bucket.launch(self.backend)
        for bucket in self._buckets:
            bucket.wait()

    def _forget(self) -> None:
        """No gradient of the present round has arrived yet."""
        self._next = 0
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.waiting_for = len(bucket.params)

    def _require_open(self) -> None:
        if not self.backend.is_open:
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


def _live(backend: Backend) -> list[Reducer]:
    """The reducers that have not been garbage-collected, in the order in which every rank made them."""
    return [reducer for reference in backend.reducers if (reducer := reference()) is not None]


def _end_backward(backend: Backend, backward: int) -> None:
    """Reduce what is due. Every reducer that the backward touched asks for this; the first one does it for all."""
    due = [reducer for reducer in _live(backend) if reducer._has_ended(backward)]
    if due:
        _run_round(backend, due)


def _run_round(backend: Backend, due: Sequence[Reducer]) -> None:
    """Reduce those that are due on any rank: Note [several optimizers]."""
    if len(backend.reducers) > 1:
        flags = torch.zeros(len(backend.reducers))
        flags[[reducer._number for reducer in due]] = 1
        backend.allreduce_(flags, "max", backend.names.next("gradients.due")).wait()
        due = [reducer for reducer in _live(backend) if flags[reducer._number]]
    for reducer in due:
        reducer._reduce()

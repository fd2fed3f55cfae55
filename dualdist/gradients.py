"""Gradients averaged over all ranks by the time backward() returns: buckets, the reducer, wrap_optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.autograd import Variable

from dualdist.backends.base import Backend, Work
from dualdist.collectives import allreduce, check_same_tensors, divide_
from dualdist.errors import UnsupportedError, UsageError

GradientOp = Literal["mean", "sum"]
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

REDUCER = "_dualdist_reducer"

# A small first bucket starts the first transfer early; the size of the others is DDP's.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20

# Note [bucket order]: all ranks must reduce the same buckets in the same order, but autograd may finish gradients in
# another order on each rank, and skip those that a rank's loss does not touch. So a full bucket leaves only after all
# before it. What has not left when backward ends leaves then; a gradient that is None travels as zeros beside a flag
# that says so.


def plan_buckets(params: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Which of the numbered parameters travel together, last ones first: autograd finishes the last layers first.

    A bucket holds one device and one dtype, and is closed by the parameter that fills it.
    """
    buckets: list[tuple[int, ...]] = []
    open_members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    limit = FIRST_BUCKET_BYTES
    for number in reversed(numbers):
        kind = (params[number].device, params[number].dtype)
        members = open_members.setdefault(kind, [])
        members.append(number)
        if sum(params[member].nbytes for member in members) >= limit:
            buckets.append(tuple(open_members.pop(kind)))
            limit = BUCKET_BYTES
    return buckets + [tuple(members) for members in open_members.values()]


class Bucket:
    """A flat buffer with a place for each member's gradient, and behind them a flag for each: "I had a gradient"."""

    def __init__(self, params: Sequence[torch.Tensor], name: str) -> None:
        self.params = params
        self.name = name
        first = params[0]
        counts = [param.numel() for param in params]
        self.flat = torch.zeros(sum(counts) + len(params), dtype=first.dtype, device=first.device)
        pieces = self.flat[: sum(counts)].split(counts)
        self.views = [piece.view(param.shape) for piece, param in zip(pieces, params, strict=True)]
        self.flags = self.flat[sum(counts) :]
        self.waiting_for = len(params)
        self.work: Work | None = None

    def launch(self, backend: Backend) -> None:
        """Copy the gradients in and send them off."""
        grads = [param.grad for param in self.params]
        present = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if len(present) < len(grads):
            self.flat.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        self.flags.copy_(torch.tensor([float(grad is not None) for grad in grads]))
        self.work = backend.allreduce_(self.flat, "sum", self.name)

    def finish(self, size: int, op: GradientOp) -> None:
        """Put the reduced gradients back; a parameter that no rank used keeps None."""
        assert self.work is not None, "a bucket is finished after it was launched"
        self.work.wait()
        self.work = None
        used = [True] * len(self.params)
        if any(param.grad is None for param in self.params):
            used = (self.flags.abs() > 0).tolist()
        if op == "mean":
            divide_(self.flat, size)
        targets, sources = [], []
        for param, view, was_used in zip(self.params, self.views, used, strict=True):
            if not was_used:
                continue
            if param.grad is None:
                param.grad = torch.empty_like(param)
            targets.append(param.grad)
            sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.waiting_for = len(self.params)


# Note [interrupted backward]: a backward that raises never runs its callback. What it had sent, the other ranks still
# wait to complete, so the next backward first finishes that round with the gradients there are. A backward inside a
# backward (re-entrant checkpointing) looks the same and gets the same treatment, which costs it a round and is right as
# well: reducing gradients that are reduced already leaves them as they are.


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
        self._backend = backend
        self._parameters = parameters
        self._name = backend.names.next("gradients")
        self._op = op
        self._accumulate = accumulate
        self._params: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # id of a parameter -> its place in _params
        self._names: list[str] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: list[Bucket] = []
        self._arrived: set[int] = set()
        self._next = 0  # the first bucket that has not been launched
        self._backwards_open: set[int] = set()  # autograd's numbers of the backwards whose end is awaited
        self._backwards = 0  # since the last step
        self._rounds = 0  # of reductions, since the last step

    def update(self) -> None:
        """Reduce also those parameters that are new, or want gradients, since the last look; every rank calls this.

        MismatchError on every rank where the ranks' parameters differ.
        """
        fresh = [(name, p) for name, p in self._parameters() if p.requires_grad and id(p) not in self._numbers]
        if not fresh:
            return
        check_same_tensors(self._backend, fresh, 0)
        start = len(self._params)
        for number, (name, param) in enumerate(fresh, start):
            if param.layout is not torch.strided:
                raise UnsupportedError(f"parameter {name} has the layout {param.layout}: only dense ones are reduced")
            self._numbers[id(param)] = number
            self._params.append(param)
            self._names.append(name)
            self._hook(param, number)
        owner: dict[int, Bucket] = {}
        for members in plan_buckets(self._params, range(start, len(self._params))):
            bucket = Bucket([self._params[member] for member in members], f"{self._name}.{len(self._buckets)}")
            self._buckets.append(bucket)
            owner.update(dict.fromkeys(members, bucket))
        self._bucket_of.extend(owner[number] for number in range(start, len(self._params)))

    def before_step(self) -> None:
        """Take part where this rank's backwards reduced nothing since the last step, or left something unreduced."""
        if self._rounds == 0 or self._backwards % self._accumulate:
            self.update()
            self._reduce()
        self._rounds = self._backwards = 0

    def mean_loss(self, loss: Any) -> Any:
        """A closure's loss, averaged, so that all ranks decide alike (LBFGS's line search looks at it)."""
        if not isinstance(loss, (torch.Tensor, float)):
            return loss
        value = torch.as_tensor(loss, dtype=None if isinstance(loss, torch.Tensor) else torch.float64)
        mean = allreduce(self._backend, value, "mean", None).wait()
        return mean if isinstance(loss, torch.Tensor) else mean.item()

    def _hook(self, param: torch.Tensor, number: int) -> None:
        # The hook must not keep the reducer alive: the optimizer does, and a model may outlive its optimizers.
        reducer = weakref.ref(self)

        def arrived(param: torch.Tensor) -> None:
            mine = reducer()
            if mine is not None:
                mine._mark(param, number)

        param.register_post_accumulate_grad_hook(arrived)

    def _mark(self, param: torch.Tensor, number: int) -> None:
        """Autograd has finished this parameter's gradient."""
        if param.grad is not None and param.grad.is_sparse:
            raise UnsupportedError(
                f"the gradient of {self._names[number]} is sparse, and only dense ones are reduced: "
                "build the embedding with sparse=False"
            )
        backward = torch._C._current_graph_task_id()
        if backward not in self._backwards_open:
            self._begin_backward(backward)
        if (self._backwards + 1) % self._accumulate or number in self._arrived:
            return
        self._arrived.add(number)
        self._bucket_of[number].waiting_for -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].waiting_for == 0:
            self._buckets[self._next].launch(self._backend)
            self._next += 1

    def _begin_backward(self, backward: int) -> None:
        if self._next > 0:
            self._reduce()  # Note [interrupted backward]
        self._forget()
        self.update()
        self._backwards_open.add(backward)
        Variable._execution_engine.queue_callback(lambda: self._end_backward(backward))

    def _end_backward(self, backward: int) -> None:
        self._backwards_open.discard(backward)
        self._backwards += 1
        if self._backwards % self._accumulate == 0:
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Launch what has not left yet, and wait for everything."""
        for bucket in self._buckets[self._next :]:
            bucket.launch(self._backend)
        for bucket in self._buckets:
            bucket.finish(self._backend.size, self._op)
        self._forget()
        self._rounds += 1

    def _forget(self) -> None:
        """No gradient of the present round has arrived yet."""
        self._next = 0
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.waiting_for = len(bucket.params)


def wrap_optimizer(
    backend: Backend,
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    op: GradientOp,
    accumulate: int,
) -> OptimizerT:
    """Reduce the gradients of the optimizer's parameters; returns the optimizer, which stays what it was."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"wrap_optimizer takes a torch optimizer, not a {type(optimizer).__name__}")
    if op not in ("mean", "sum"):
        raise UsageError(f"op {op!r}: gradients are reduced by 'mean' or 'sum'")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r}: expected the number of backwards before a reduction, 1 or more")
    if hasattr(optimizer, REDUCER):
        raise UsageError("this optimizer is wrapped already: wrap_optimizer returns the same object, call it once")
    given = _names_by_id(named_parameters)
    missing = [name for name, param in _named(optimizer, {}) if given and id(param) not in given]
    if missing:
        raise UsageError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters (the first is {missing[0]}): "
            "pass model.named_parameters() of the whole model, or leave it out"
        )
    reducer = Reducer(backend, lambda: _named(optimizer, given), op, accumulate)
    reducer.update()
    _attach(reducer, optimizer)
    return optimizer


def _attach(reducer: Reducer, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer tell the reducer of its steps and new parameters. Pickles and copies do not carry this."""

    def before_step(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            reducer.before_step()
            return None

        def reduced_closure() -> Any:
            loss = closure()
            reducer.before_step()
            return reducer.mean_loss(loss)

        # With a closure, the backward is yet to come, and LBFGS runs several.
        return args[:1], {**kwargs, "closure": reduced_closure}

    add_param_group = optimizer.add_param_group

    def add_and_reduce(param_group: dict[str, Any]) -> None:
        add_param_group(param_group)
        reducer.update()

    optimizer.register_step_pre_hook(before_step)
    setattr(optimizer, REDUCER, reducer)
    setattr(optimizer, "add_param_group", add_and_reduce)  # noqa: B010  this object's method, not its class's


def _names_by_id(named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> dict[int, str]:
    pairs = list(named_parameters or ())
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError("named_parameters takes pairs of a name and a parameter: pass model.named_parameters()")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(f"named_parameters gives the name {twice[0]!r} to several parameters: names are unique")
    return {id(param): name for name, param in pairs}


def _named(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters, each with its given name or its place in the groups."""
    return [
        (names.get(id(param), f"group {group_number}, parameter {number}"), param)
        for group_number, group in enumerate(optimizer.param_groups)
        for number, param in enumerate(group["params"])
    ]

"""One rank's call of a collective, and the handle by which a program waits for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from dualdist.backends.base import Backend
from dualdist.backends.operation import Stages, Within
from dualdist.collectives.dynamo import disable_compile
from dualdist.collectives.negotiation import CollectiveRequest, RankRequests
from dualdist.utils import accelerator

T = TypeVar("T")
U = TypeVar("U")
# Maps the gradients of the results, and each rank's rank_args, to the gradients of the inputs.
Backward = Callable[[Sequence[torch.Tensor], Sequence[Any]], torch.Tensor | Sequence[torch.Tensor]]


class Performer(Protocol):
    """The group of a collective, which has the ranks agree and performs it."""

    wait_times: Any

    def submit(self, collective: Collective[T]) -> Handle[T]:
        """Queue a collective."""

    def waiting_call(self, request: CollectiveRequest) -> contextlib.AbstractContextManager[None]:
        """Know this thread's call, whose result it waits for, in the block."""

    def attend(self) -> None:
        """Let a thread carry on what is pending."""

    def poll(self) -> None:
        """Move what is pending without waiting, where no thread does."""

    def wait_for(self, handle: Handle[Any]) -> None:
        """Wait until the handle is done."""


@dataclass(frozen=True)
class Collective(Generic[T]):
    """The description of one call: its request to the other ranks, its work on a backend, and its gradient.

    Attributes:
        group: The ranks that take part.
        request: Compared with the requests of the other ranks before any data moves.
        perform: Called as `perform(backend, rank_args)` once all ranks agree; rank_args[i] are those of rank i,
            None if it has joined. Returns the result, or stages that do.
        device: The device of the tensors, if there are any.
        inputs: The tensors through which gradients flow. `perform` may fill a list that is given here.
        timeout_s: How long a wait for it may make no progress; None for the limit of the session.
        backward: Called on every rank with the gradients of the results, and `rank_args`, in the backward pass. Leaves
            out tensors whose dtype has no gradient. Must hold no reference to an input or a result.
    """

    group: Performer
    request: CollectiveRequest
    perform: Callable[[Backend, Sequence[Any]], Any]
    device: torch.device | None = None
    inputs: Sequence[torch.Tensor] = ()
    backward: Backward | None = None
    timeout_s: float | None = None

    def map(self, function: Callable[[T], U]) -> Collective[U]:
        """Return the same collective with `function` applied to its result."""

        def perform(backend: Backend, rank_args: Sequence[Any]) -> Stages[U]:
            found = self.perform(backend, rank_args)
            return function((yield from found) if isinstance(found, Generator) else found)

        return replace(cast("Collective[U]", self), perform=perform)

    def start(self) -> Handle[T]:
        """Begin, and return at once; no gradient flows."""
        return self.group.submit(self).begin()

    def run(self) -> T:
        """Wait for the result; gradients flow through it if an input requires one."""
        with self.group.waiting_call(self.request):
            handle = self.group.submit(self)
            result = handle.wait()
        if self.backward is None or not requires_grad(self.inputs):
            return result
        results = [result] if isinstance(result, torch.Tensor) else cast(Sequence[torch.Tensor], result)
        tracked = cast(Any, _Gradient).apply(results, handle.rank_args, self.backward, *self.inputs)
        return cast(T, tracked[0] if isinstance(result, torch.Tensor) else type(result)(tracked))  # type: ignore[call-arg]


class _Gradient(torch.autograd.Function):
    """Connect the results of a collective to its inputs; second derivatives follow `backward`."""

    @staticmethod
    def forward(
        ctx: Any, results: Sequence[torch.Tensor], rank_args: Sequence[Any], backward: Backward, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.rank_args, ctx.backward_of = rank_args, backward
        ctx.of_inputs = [is_differentiable(tensor) for tensor in inputs]
        ctx.of_results = [is_differentiable(tensor) for tensor in results]
        ctx.mark_non_differentiable(*(tensor for tensor in results if not is_differentiable(tensor)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given = [gradient.contiguous() for gradient, has in zip(gradients, ctx.of_results, strict=True) if has]
        found = ctx.backward_of(given, ctx.rank_args)
        remaining = iter([found] if isinstance(found, torch.Tensor) else found)
        return (None, None, None, *(next(remaining) if has else None for has in ctx.of_inputs))


def requires_grad(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if autograd follows any of the tensors now."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return True if tensors of this dtype can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


class Handle(Generic[T]):
    """A collective under way. Every call of wait() returns its result, or raises its error."""

    def __init__(self, collective: Collective[T]) -> None:
        self.request = collective.request
        self.name = collective.request.name
        self.rank_args: Sequence[Any] = ()  # of each rank, once it was performed
        self.error: BaseException | None = None
        self.began = 0.0 if collective.group.wait_times is None else time.monotonic()
        self.waits_since: float | None = None  # if the program waited before it called wait()
        self.timeout_s = collective.timeout_s
        self._group: Performer = collective.group
        self._collective: Collective[T] | None = collective
        self._stream = accelerator.current_stream(collective.device)
        self._is_inference = torch.is_inference_mode_enabled()
        self._result: T
        self.is_done = False

    def done(self) -> bool:
        """Return True if wait() would return at once; moves what can be moved, where no thread does."""
        if not self.is_done:
            self._group.poll()
        return self.is_done

    def failed(self) -> bool:
        """Return True if wait() would raise at once."""
        return self.error is not None

    @disable_compile
    def begin(self) -> Handle[T]:
        """Let a thread carry the collective on while the program does something else; return this handle."""
        if not self.is_done:
            self._group.attend()
        return self

    @disable_compile
    def wait(self) -> T:
        """Wait for the result, and return it; raise CollectiveError if the collective failed."""
        if not self.is_done:
            self._group.wait_for(self)
        if self.error is not None:
            raise self.error
        return self._result

    def perform(
        self, backend: Backend, rank_args: Sequence[Any], describe: Callable[[BaseException], BaseException]
    ) -> Stages[None]:
        """Perform the collective; what `describe` returns for an error is kept for wait()."""
        assert self._collective is not None, "a collective is performed once"
        self.rank_args = rank_args
        try:
            with self._context():
                found = self._collective.perform(backend, rank_args)
            result = (yield from self._in_context(found)) if isinstance(found, Generator) else found
        except Exception as error:  # of any kind: wait() raises it
            self.fail(describe(error))
        else:
            self._result = result
            self._end()

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Set the stream and the inference mode of the call, whichever thread performs it."""
        with accelerator.on_stream(self._stream), _inference_mode(self._is_inference):
            yield

    def _in_context(self, stages: Stages[T]) -> Stages[T]:
        """Run the stages in the stream and the mode of the call, whichever thread advances them."""
        resume: Callable[[], Any] = lambda: stages.send(None)  # noqa: E731
        while True:
            with self._context():
                try:
                    operation = resume()
                except StopIteration as end:
                    return cast(T, end.value)
            try:
                value = yield Within(operation, self._context)
            except Exception as error:
                resume = partial(stages.throw, error)
            else:
                resume = partial(stages.send, value)

    def fail(self, error: BaseException) -> None:
        """Let wait() raise this error, unless the handle is done."""
        if not self.is_done:
            self.error = error
            self._end()

    def _end(self) -> None:
        self._collective = None  # frees the tensors that it holds
        self.is_done = True


def _inference_mode(is_wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the inference mode of the call, for the thread that performs it."""
    if torch.is_inference_mode_enabled() == is_wanted:
        return contextlib.nullcontext()
    return torch.inference_mode(is_wanted)


def rank_args_of(rows: Sequence[RankRequests], name: str) -> list[Any]:
    """Return each rank's arguments of a request, None where the rank has joined."""
    requests = [row.request(name) for row in rows]
    return [None if request is None else request.rank_args for request in requests]

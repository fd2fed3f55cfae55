"""Running operations: state machines that a channel advances (dualdist/engine/channel.py), and those made of others.

An operation has no queue, no time limit and no thread: whoever advances its channel advances it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

from dualdist.errors import CollectiveError, DualdistError

T = TypeVar("T")
U = TypeVar("U")


class Operation(ABC, Generic[T]):
    """A running operation of a transport.

    advance() may be called again after an exception of a signal handler has left it, and after it has returned True.

    Attributes:
        result: what the operation returns, once advance() has returned True.
        steps: grows whenever the operation makes progress, as far as that is known before it ends.
        admits_next: the next operation may begin on the transport before this one has ended; may become True when
            advance() has returned False.
        failure: what its own code raised, which ended it. Errors of transports are DualdistErrors; any other exception
            is of a signal handler, and the operation can be advanced again.
    """

    result: T
    admits_next = True
    failure: BaseException | None = None

    @property
    def steps(self) -> int:
        return 0

    @abstractmethod
    def advance(self, wait_s: float) -> bool:
        """Move what can be moved, and wait for at most about `wait_s` seconds; return True once the operation ended."""


class Completed(Operation[T]):
    """An operation whose result is known when it begins."""

    def __init__(self, result: T) -> None:
        self.result = result

    def advance(self, wait_s: float) -> bool:
        return True


class PerformedByCaller(Operation[None]):
    """Stands in a queue for an operation that a program performs itself: Channel.enter()."""

    result = None
    admits_next = False

    def advance(self, wait_s: float) -> bool:
        return False


class Wrapped(Operation[U], Generic[T, U]):
    """An operation that advances as another one does."""

    def __init__(self, operation: Operation[T]) -> None:
        self._operation = operation

    @property
    def steps(self) -> int:
        return self._operation.steps

    @property
    def admits_next(self) -> bool:  # type: ignore[override]
        return self._operation.admits_next


class Converted(Wrapped[T, U]):
    """An operation whose result is `convert` of another one's: mostly its copy in another tensor."""

    def __init__(self, operation: Operation[T], convert: Callable[[T], U]) -> None:
        super().__init__(operation)
        self._convert: Callable[[T], U] | None = convert

    def advance(self, wait_s: float) -> bool:
        try:
            if not self._operation.advance(wait_s):
                return False
        except Exception:
            self.failure = self._operation.failure
            raise
        if self._convert is not None:
            convert, self._convert = self._convert, None
            try:
                self.result = convert(self._operation.result)
            except Exception as error:
                self.failure = error
                raise
        elif not hasattr(self, "result"):
            raise CollectiveError("it was interrupted before its result was complete")
        return True


class Within(Wrapped[T, T]):
    """An operation that advances in a context: the stream and the mode of the call, whichever thread advances it."""

    def __init__(self, operation: Operation[T], context: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(operation)
        self._context = context

    def advance(self, wait_s: float) -> bool:
        try:
            with self._context():
                if not self._operation.advance(wait_s):
                    return False
                self.result = self._operation.result
        except Exception:
            self.failure = self._operation.failure
            raise
        return True


# A generator that yields each operation for which it waits, is sent that one's result, and returns its own.
Stages = Generator[Operation[Any], Any, T]


class Staged(Operation[T]):
    """One operation of several stages, which follow each other whoever advances it."""

    admits_next = False  # else the order of messages would depend on when each rank begins its next stage

    def __init__(self, stages: Stages[T]) -> None:
        self._stages = stages
        self._current: Operation[Any] | None = None
        self._is_between = False  # True while the stages run, and after an exception has ended them
        self._has_ended = False
        self._stages_done = 0
        self._go_on(lambda: stages.send(None))

    @property
    def steps(self) -> int:
        return self._stages_done + (0 if self._current is None else self._current.steps)

    def advance(self, wait_s: float) -> bool:
        while not self._has_ended:
            current = self._current
            if self._is_between or current is None:
                raise CollectiveError("it was interrupted between two of its stages")
            try:
                if not current.advance(wait_s):
                    return False
            except Exception as error:
                if not isinstance(error, DualdistError) and current.failure is not error:
                    raise
                self._go_on(partial(self._stages.throw, error))
            else:
                self._go_on(lambda current=current: self._stages.send(current.result))  # type: ignore[misc]
        return True

    def _go_on(self, resume: Callable[[], Operation[Any]]) -> None:
        """Run the stages up to the next operation that they wait for."""
        self._is_between = True
        try:
            self._current = resume()
        except StopIteration as end:
            self.result = end.value
            self._current = None  # frees its tensors
            self._has_ended = True
        except Exception as error:
            self.failure = error
            raise
        self._stages_done += 1
        self._is_between = False

"""Operations under way, by the numbers that Horovod's programs hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualdist.collectives.work import Handle
from dualdist.errors import UsageError
from dualdist.hvd.exceptions import horovods_errors
from dualdist.hvd.face import current


def started(handle: Handle[Any], result: Callable[[Any], Any] = lambda value: value) -> int:
    """The number by which poll() and synchronize() know the operation."""
    face = current()
    number = next(face.numbers)
    face.pending[number] = handle.begin(), result
    return number


def poll(handle: int) -> bool:
    """Whether synchronize() would return at once; ValueError where there is no such operation, or no more."""
    pending = current().pending
    if handle not in pending:
        raise UsageError(f"handle {handle} is of no operation under way: was it synchronized already?")
    return pending[handle][0].done()


def synchronize(handle: int) -> Any:
    """The operation's result, once it is there; None where there is no such operation, or no more."""
    found = current().pending.pop(handle, None)
    if found is None:
        return None
    with horovods_errors():
        return found[1](found[0].wait())

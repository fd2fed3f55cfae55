"""Arguments that one rank refuses are an error on every rank, before any has sent something."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

import torch

from dualdist.collectives.arguments import name_of
from dualdist.collectives.group import Group
from dualdist.collectives.handle import Collective
from dualdist.collectives.negotiation import REFUSED, CollectiveRequest
from dualdist.errors import UnsupportedError, UsageError

F = TypeVar("F", bound=Callable[..., Collective[Any]])


def refuse(group: Group, kind: str, name: str, error: UsageError | UnsupportedError) -> NoReturn:
    """Raise an error of this kind on every rank: this rank cannot take part, and none has sent anything."""
    if error.names_operation:  # raised on all ranks already
        raise error
    group.require_usable()
    request = CollectiveRequest(kind, name, {REFUSED: f"{error}"})
    message = f"{request}: {error}"
    try:
        Collective(group, request, lambda backend, rank_args: None).run()
    except UsageError as agreed:
        message = f"{agreed}"
    refused = type(error)(message)
    refused.names_operation = True
    raise refused from error


@contextlib.contextmanager
def refused_alike(group: Group, kind: str, name: str) -> Iterator[None]:
    """Raise on every rank what refuses an argument in this block on any rank: Note [checked before sent]."""
    try:
        yield
    except (UsageError, UnsupportedError) as error:
        refuse(group, kind, name, error)


def description(describe: F) -> F:
    """Let all ranks raise where the description of one refuses its arguments, before it has numbered a name."""

    @functools.wraps(describe)
    def call(*args: Any, **kwargs: Any) -> Collective[Any]:
        try:
            return describe(*args, **kwargs)
        except (UsageError, UnsupportedError) as error:
            given = inspect.signature(describe).bind(*args, **kwargs).arguments
            tensors, name = given.get("tensors"), given.get("name")
            is_grouped = isinstance(tensors, list) and all(isinstance(each, torch.Tensor) for each in tensors)
            kind = f"grouped_{describe.__name__}" if is_grouped else describe.__name__
            refuse(given["group"], kind, name_of(given["group"], kind, name if isinstance(name, str) else None), error)

    return cast(F, call)

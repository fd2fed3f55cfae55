"""dd.run: a function of a program or a notebook on several new ranks of this host."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dualdist.errors import LaunchError
from dualdist.launch.spawn import spawn_apart
from dualdist.utils.pickling import pickler

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Run fn(*args, **kwargs) on `np` new ranks of this host; returns their results in rank order.

    As dd.spawn, for interactive work: `fn` may be defined in a notebook or in the program itself, which needs no
    guard, and may be a lambda or a closure (pip install cloudpickle). It calls dd.init() itself; `backend`, if given,
    is what that takes by default, and `env` is set on every rank.

    Blocks until all ranks have ended. When one fails the others are ended, and its own exception is raised here; the
    LaunchError from which it is raised has the rank and its traceback, and is raised itself where the exception cannot
    be sent.
    """
    payload = pickler(fn).dumps((fn, tuple(args), dict(kwargs or {})))
    try:
        results = spawn_apart(_call, np, (payload,), backend=backend, env=env)
    except LaunchError as failure:
        if failure.exception is None:
            raise
        raise pickle.loads(failure.exception) from failure
    return [pickle.loads(result) for result in results]


def _call(payload: bytes) -> bytes:
    """What a rank runs; the result is pickled here, so that it may be of a class that only cloudpickle can send."""
    fn, args, kwargs = pickle.loads(payload)
    return bytes(pickler(fn).dumps(fn(*args, **kwargs)))

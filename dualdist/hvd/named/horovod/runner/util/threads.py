"""`horovod.runner.util.threads` under the alias: a thread in a line."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., object],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """A started thread that runs target(*args); a silent one swallows what target raises."""
    if not isinstance(args, tuple):
        raise ValueError(f"args={args!r}: expected a tuple")

    def run() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread

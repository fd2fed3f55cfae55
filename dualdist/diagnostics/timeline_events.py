"""Timeline events of a rank, from torch's hooks and the observers of its groups."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as modules

from dualdist.collectives.group import Group
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.diagnostics.trace_format import COMMUNICATION, COMPUTE, STEPS, TraceSpan

# Limits a trace to about 100 MB of memory.
MOST_SPANS = 300_000


class EventListener:
    """Collects spans from start() to stop(), from several threads."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.spans: list[TraceSpan] = []
        self.is_full = False
        self._now = now
        self._open: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._depth = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._steps = 0
        self._last_step_ns = 0

    def start(self) -> None:
        """Record every forward and backward of this process."""
        self._last_step_ns = self._now()
        before = modules.register_module_forward_pre_hook(self._before_forward)
        after = modules.register_module_forward_hook(self._after_forward, always_call=True)
        self._undo = [before.remove, after.remove, self._wrap_backward()]

    def stop(self) -> None:
        """Stop recording; open spans are kept as unfinished."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        ended = self._now()
        for key, (start_ns, *_) in list(self._open.items()):
            self._keep(TraceSpan(COMMUNICATION, " ".join(key[2:]), start_ns, ended, {"unfinished": True}))
        self._open.clear()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Record this optimizer's steps. The reducer's hook runs first, so a step starts with reduced gradients."""
        began: list[tuple[FrameType, int]] = []  # the frame that called the hook, and when

        def before_step(*_: Any) -> None:
            caller = sys._getframe(1)
            active = set(_callers(caller))
            began[:] = [each for each in began if each[0] in active]  # drops steps that raised
            began.append((caller, self._now()))

        def after_step(*_: Any) -> None:
            start_ns, end_ns = began.pop()[1], self._now()
            if began or not self._undo:  # step() of a base class runs the hooks too
                return
            name = type(optimizer).__name__
            self._keep(TraceSpan(COMPUTE, f"step {name}", start_ns, end_ns))
            self._keep(TraceSpan(STEPS, f"step {self._steps}", self._last_step_ns, end_ns))
            self._steps += 1
            self._last_step_ns = end_ns

        self._undo += [
            optimizer.register_step_pre_hook(before_step).remove,
            optimizer.register_step_post_hook(after_step).remove,
        ]

    def observe(self, group: Group) -> None:
        """Record all operations of the group, in addition to its other observers."""
        group.observer = chain_observers(group.observer, functools.partial(self.operation, id(group)))
        group.monitor.observer = chain_observers(group.monitor.observer, functools.partial(self.transfer, id(group)))

    def operation(self, group: int, event: str, request: CollectiveRequest | None) -> None:
        """For Group.observer."""
        if request is None:
            return
        key, now = (group, "operation", request.kind, request.name), self._now()
        if event == "entered":
            self._open[key] = (now,)
        elif event == "agreed":
            self._open[key] = (*self._open.get(key, (now,)), now)
        elif key in self._open:
            start_ns, *agreed = self._open.pop(key)
            parts = tuple(("agreeing with the other ranks", start_ns, at) for at in agreed[:1])
            self._keep(
                TraceSpan(COMMUNICATION, f"{request.kind} {request.name}", start_ns, now, {"what": str(request)}, parts)
            )

    def transfer(self, group: int, event: str, kind: str, name: str, nbytes: int) -> None:
        """For Monitor.observer: reductions of gradients, from start until this rank finds them done."""
        key, now = (group, "gradients", kind, name), self._now()
        if event == "begun":
            self._open[key] = (now,)
        elif key in self._open:
            (start_ns,) = self._open.pop(key)
            self._keep(TraceSpan(COMMUNICATION, f"{kind} {name}", start_ns, now, {"bytes": nbytes}))

    def _keep(self, span: TraceSpan) -> None:
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)
        else:
            self.is_full = True

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Push the start; only the outermost module is recorded."""
        starts = self._starts()
        starts.append(self._now())

    def _after_forward(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        starts = self._starts()
        if not starts:  # it began before start()
            return
        start_ns = starts.pop()
        if not starts:
            self._keep(TraceSpan(COMPUTE, f"forward {type(module).__name__}", start_ns, self._now()))

    def _starts(self) -> list[int]:
        """Return the start times of this thread's open forwards."""
        if not hasattr(self._depth, "starts"):
            self._depth.starts = []
        starts: list[int] = self._depth.starts
        return starts

    def _wrap_backward(self) -> Callable[[], None]:
        """Record torch.autograd.backward, which Tensor.backward() calls; return a function that undoes this."""
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            start_ns = self._now()
            try:
                return backward(*args, **kwargs)
            finally:
                self._keep(TraceSpan(COMPUTE, "backward", start_ns, self._now()))

        def undo() -> None:
            if torch.autograd.backward is recorded:  # else it has been wrapped again
                torch.autograd.backward = backward

        torch.autograd.backward = recorded
        return undo


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def chain_observers(
    first: Callable[..., None] | None, second: Callable[..., None] | None
) -> Callable[..., None] | None:
    """Return an observer that calls both, or the only one."""
    if first is None or second is None:
        return first or second

    def call_both(*args: Any) -> None:
        first(*args)
        second(*args)

    return call_both

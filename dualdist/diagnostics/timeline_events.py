"""What a rank does, heard of from torch's hooks and from its groups."""

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

# A rank that is traced for hours stops there, and says so: about 100 MB of memory.
MOST_SPANS = 300_000


class EventListener:
    """Collects spans from start() to stop(); several threads may tell it."""

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.spans: list[TraceSpan] = []
        self.is_full = False
        self._now = now
        self._under_way: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._depth = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._steps = 0
        self._last_step_ns = 0

    def start(self) -> None:
        """Hear of every forward and backward of this process."""
        self._last_step_ns = self._now()
        before = modules.register_module_forward_pre_hook(self._forward_begins)
        after = modules.register_module_forward_hook(self._forward_ends, always_call=True)
        self._undo = [before.remove, after.remove, self._hear_backward()]

    def stop(self) -> None:
        """Hear of nothing more. What is under way is kept as unfinished."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        ended = self._now()
        for key, (start_ns, *_) in list(self._under_way.items()):
            self._keep(TraceSpan(COMMUNICATION, " ".join(key[2:]), start_ns, ended, {"unfinished": True}))
        self._under_way.clear()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of this optimizer's steps. The reducer's hook came before, so a step begins with reduced gradients."""
        began: list[tuple[FrameType, int]] = []  # by which call of the hooks, and when

        def begins(*_: Any) -> None:
            caller = sys._getframe(1)
            under_way = set(_callers(caller))
            began[:] = [each for each in began if each[0] in under_way]  # a step that has raised never ended
            began.append((caller, self._now()))

        def ends(*_: Any) -> None:
            start_ns, end_ns = began.pop()[1], self._now()
            if began or not self._undo:  # a step that calls that of its base class runs the hooks twice
                return
            name = type(optimizer).__name__
            self._keep(TraceSpan(COMPUTE, f"step {name}", start_ns, end_ns))
            self._keep(TraceSpan(STEPS, f"step {self._steps}", self._last_step_ns, end_ns))
            self._steps += 1
            self._last_step_ns = end_ns

        self._undo += [optimizer.register_step_pre_hook(begins).remove, optimizer.register_step_post_hook(ends).remove]

    def observe(self, group: Group) -> None:
        """Hear of all that happens in the group, besides whoever else does."""
        group.observer = chain_observers(group.observer, functools.partial(self.operation, id(group)))
        group.monitor.observer = chain_observers(group.monitor.observer, functools.partial(self.moved, id(group)))

    def operation(self, group: int, event: str, offer: CollectiveRequest | None) -> None:
        """For Group.observer."""
        if offer is None:
            return
        key, now = (group, "operation", offer.kind, offer.name), self._now()
        if event == "entered":
            self._under_way[key] = (now,)
        elif event == "agreed":
            self._under_way[key] = (*self._under_way.get(key, (now,)), now)
        elif key in self._under_way:
            start_ns, *agreed = self._under_way.pop(key)
            parts = tuple(("agreeing with the other ranks", start_ns, at) for at in agreed[:1])
            self._keep(
                TraceSpan(COMMUNICATION, f"{offer.kind} {offer.name}", start_ns, now, {"what": offer.what}, parts)
            )

    def moved(self, group: int, event: str, kind: str, name: str, nbytes: int) -> None:
        """For Watch.observer: gradients, from when they leave to when this rank finds them reduced."""
        key, now = (group, "gradients", kind, name), self._now()
        if event == "begun":
            self._under_way[key] = (now,)
        elif key in self._under_way:
            (start_ns,) = self._under_way.pop(key)
            self._keep(TraceSpan(COMMUNICATION, f"{kind} {name}", start_ns, now, {"bytes": nbytes}))

    def _keep(self, span: TraceSpan) -> None:
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)
        else:
            self.is_full = True

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        """Of the outermost module; those inside of it are its own business."""
        starts = self._starts()
        starts.append(self._now())

    def _forward_ends(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        starts = self._starts()
        if not starts:  # it began before we listened
            return
        start_ns = starts.pop()
        if not starts:
            self._keep(TraceSpan(COMPUTE, f"forward {type(module).__name__}", start_ns, self._now()))

    def _starts(self) -> list[int]:
        """When the forwards that are under way in this thread began."""
        if not hasattr(self._depth, "starts"):
            self._depth.starts = []
        starts: list[int] = self._depth.starts
        return starts

    def _hear_backward(self) -> Callable[[], None]:
        """Tensor.backward() calls torch.autograd.backward, whoever calls it; returns what makes that undone."""
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def heard(*args: Any, **kwargs: Any) -> Any:
            start_ns = self._now()
            try:
                return backward(*args, **kwargs)
            finally:
                self._keep(TraceSpan(COMPUTE, "backward", start_ns, self._now()))

        def undo() -> None:
            if torch.autograd.backward is heard:  # else somebody has wrapped it again, and has to keep it
                torch.autograd.backward = backward

        torch.autograd.backward = heard
        return undo


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame, and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def chain_observers(
    first: Callable[..., None] | None, second: Callable[..., None] | None
) -> Callable[..., None] | None:
    """An observer that tells both, or the one that there is."""
    if first is None or second is None:
        return first or second

    def tell(*args: Any) -> None:
        first(*args)
        second(*args)

    return tell

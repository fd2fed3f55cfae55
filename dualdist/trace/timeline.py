"""Timeline of a session: a Chrome trace of all ranks, which rank 0 collects and writes at shutdown.

Without a shutdown each rank writes its part at exit, and a rank that finds all parts merges them.
"""

import atexit
import contextlib
import functools
import io
import json
import os
import pickle
import socket
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as modules

from dualdist.collectives import collectives
from dualdist.collectives.broadcast_state import allgather_object, count_running_steps
from dualdist.collectives.group import Group
from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.engine.channel import Transfer
from dualdist.errors import DualdistError, UsageError
from dualdist.trace.trace_format import (
    COMMUNICATION,
    COMPUTE,
    STEPS,
    ClockModel,
    ClockOffset,
    Event,
    TraceSpan,
    rank_events,
)
from dualdist.utils.output_file import find_write_problem, write_atomically
from dualdist.utils.variables import TIMELINE
from dualdist.version import __version__

# Limits a trace to about 100 MB of memory.
MOST_SPANS = 300_000
EXCHANGES = 8  # to measure clock offsets

Gather = Callable[[Any], list[Any]]  # all ranks' objects, in rank order


class EventListener:
    """Collects spans of this rank from start() to stop(), from several threads."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []
        self.is_full = False
        self._open: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._forwards = defaultdict[int, list[int]](list)  # when those under way began, by thread, the outermost first
        self._undo: list[Callable[[], None]] = []
        self._observed: list[tuple[Group, Callable[..., None]]] = []
        self._steps = 0
        self._last_step_ns = 0

    def start(self) -> None:
        """Record every forward and backward of this process."""
        self._last_step_ns = time.monotonic_ns()
        before = modules.register_module_forward_pre_hook(self._before_forward)
        after = modules.register_module_forward_hook(self._after_forward, always_call=True)
        self._undo = [before.remove, after.remove, self._wrap_backward()]

    def stop(self) -> None:
        """Stop recording; open spans are kept as unfinished."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        ended = time.monotonic_ns()
        for key, (start_ns, *_) in list(self._open.items()):
            self._keep(TraceSpan(COMMUNICATION, " ".join(key[2:]), start_ns, ended, {"unfinished": True}))
        self._open.clear()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Record this optimizer's steps. The reducer's hook runs first, so a step starts with reduced gradients."""
        start_ns = 0

        def before_step(*_: Any) -> None:
            nonlocal start_ns
            if count_running_steps(optimizer) == 1:  # step() of a base class runs the hooks too
                start_ns = time.monotonic_ns()

        def after_step(*_: Any) -> None:
            end_ns = time.monotonic_ns()
            if count_running_steps(optimizer) > 1 or not self._undo:
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
        observer = functools.partial(self.record, id(group))
        self._observed.append((group, observer))
        group.observers.append(observer)

    def forget(self) -> None:
        """Record no more operations; other observers stay."""
        for group, observer in self._observed:
            if observer in group.observers:
                group.observers.remove(observer)
        self._observed.clear()

    def record(self, group: int, event: str, what: CollectiveRequest | Transfer | None) -> None:
        """Record an event of a group: see Channel.observers."""
        if isinstance(what, Transfer):
            self.transfer(group, event, what)
        elif what is not None:
            self.operation(group, event, what)

    def operation(self, group: int, event: str, request: CollectiveRequest) -> None:
        """Record an event of a collective."""
        key, now = (group, "operation", request.kind, request.name), time.monotonic_ns()
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

    def transfer(self, group: int, event: str, transfer: Transfer) -> None:
        """Record an event of a reduction of gradients, from its start until this rank finds it done."""
        kind, name, nbytes = transfer.kind, transfer.name, transfer.nbytes
        key, now = (group, "gradients", kind, name), time.monotonic_ns()
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
        self._forwards[threading.get_ident()].append(time.monotonic_ns())

    def _after_forward(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        starts = self._forwards[threading.get_ident()]
        start_ns = starts.pop() if starts else None  # None: it began before start()
        if start_ns is not None and not starts:  # only the outermost module is recorded
            self._keep(TraceSpan(COMPUTE, f"forward {type(module).__name__}", start_ns, time.monotonic_ns()))

    def _wrap_backward(self) -> Callable[[], None]:
        """Record torch.autograd.backward, which Tensor.backward() calls; return a function that undoes this."""
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.monotonic_ns()
            try:
                return backward(*args, **kwargs)
            finally:
                self._keep(TraceSpan(COMPUTE, "backward", start_ns, time.monotonic_ns()))

        def undo() -> None:
            if torch.autograd.backward is recorded:  # else it has been wrapped again
                torch.autograd.backward = backward

        torch.autograd.backward = recorded
        return undo


def measure_offsets(gather: Gather, now: Callable[[], int] = time.monotonic_ns) -> tuple[list[ClockOffset], int]:
    """Return all ranks' offsets from rank 0's clock, and its last time; every rank must call this."""
    most: list[int] = []  # upper bounds of this rank's offset from each rank
    for _ in range(EXCHANGES):
        sent = gather(now())
        received = now()
        bounds = [received - at for at in sent]
        most = bounds if not most else [min(pair) for pair in zip(most, bounds, strict=True)]
    all_bounds = gather((most, now()))
    bounds_of_0, zero_ns = all_bounds[0]
    offsets = [offset_between(-bounds_of_0[other], row[0], at) for other, (row, at) in enumerate(all_bounds)]
    return offsets, int(zero_ns)


def offset_between(least_ns: int, most_ns: int, at_ns: int) -> ClockOffset:
    """Return the middle of the bounds, or 0 if it is within them."""
    if least_ns <= 0 <= most_ns:
        return ClockOffset(0.0, float(max(-least_ns, most_ns)), at_ns)
    return ClockOffset((least_ns + most_ns) / 2, (most_ns - least_ns) / 2, at_ns)


def max_error_ns(offsets: Sequence[ClockOffset]) -> float:
    return max((each.error_ns for each in offsets), default=0.0)


class TimelineWriter:
    """The trace of one session on one rank."""

    def __init__(self, path: Path, world: Group, title: str) -> None:
        """Raise UsageError on all ranks if rank 0 cannot write the file; every rank must call this."""
        self.listener = EventListener()
        self._path = path
        self._world = world
        self._title = title
        with contextlib.suppress(OSError):  # of an earlier run, which would be merged with this one's
            _part_path(path, world.rank).unlink(missing_ok=True)
        problems = allgather_object(world, find_write_problem(path) if world.rank == 0 else "")
        if problems[0]:
            raise _write_error(path, problems[0])
        self._offsets, self._zero_ns = measure_offsets(lambda each: allgather_object(world, each))
        self._is_written = False
        self.listener.observe(world)
        self.listener.start()
        atexit.register(self._write_part, os.getpid())

    def finish(self) -> None:
        """Write the file on rank 0, or raise UsageError there; every rank must call this."""
        if self._is_written:
            return
        self.listener.stop()
        self.listener.forget()
        try:
            later, _ = measure_offsets(lambda each: allgather_object(self._world, each))
            events = self._gather_events(self._events(later[self._world.rank]))
        except DualdistError:
            return  # the ranks are out of step: each writes its part at exit
        self._is_written = True
        atexit.unregister(self._write_part)
        if self._world.rank == 0:
            error_ns = max(max_error_ns(self._offsets), max_error_ns(later))
            try:
                self._write(self._path, events, error_ns)
            except OSError as error:
                raise _write_error(self._path, error.strerror or str(error)) from error

    def _events(self, later: ClockOffset | None = None) -> list[Event]:
        first = self._offsets[self._world.rank]
        clock = ClockModel(self._zero_ns, first, later or first)
        return rank_events(self._world.rank, self._title, self.listener.spans, clock)

    def _gather_events(self, events: list[Event]) -> list[Event]:
        """Return all ranks' events on rank 0, [] elsewhere."""
        data = pickle.dumps((zlib.compress(pickle.dumps(events), 1), self.listener.is_full))
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        stream = io.BytesIO(
            collectives.gather(self._world, rows, 0, self._world.next_name("timeline")).run().numpy().tobytes()
        )
        found: list[Event] = []
        for _ in self._world.ranks if self._world.rank == 0 else ():
            part, is_full = pickle.load(stream)
            found += pickle.loads(zlib.decompress(part))
            self.listener.is_full |= is_full
        return found

    def _write(self, path: Path, events: Sequence[Event], error_ns: float) -> None:
        about: dict[str, Any] = {"dualdist": __version__, "ranks": self._world.size}
        about["clocks_apart_us_at_most"] = round(error_ns / 1e3, 3)
        if self.listener.is_full:
            about["truncated"] = True
            print(f"dualdist: {path} has the first part of the run only: too many events", file=sys.stderr)
        document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
        write_atomically(path, json.dumps(document))

    def _write_part(self, pid: int) -> None:
        """Write this rank's part at exit if shutdown() was not called; a rank that finds all parts merges them."""
        if self._is_written or pid != os.getpid():  # not in a forked child
            return
        self._is_written = True
        self.listener.stop()
        parts = [_part_path(self._path, rank) for rank in range(self._world.size)]
        own = parts[self._world.rank]
        try:
            self._write(own, self._events(), max_error_ns(self._offsets))
            if all(part.exists() for part in parts):
                with contextlib.suppress(FileNotFoundError):  # another rank merges them, too, into the same file
                    events = [event for part in parts for event in json.loads(part.read_text())["traceEvents"]]
                    self._write(self._path, events, max_error_ns(self._offsets))
                    for part in parts:
                        part.unlink(missing_ok=True)
                return
            problem = f"the last rank to exit merges all parts into {self._path}"
        except OSError as error:
            problem = f"it cannot be written ({error.strerror})"
        print(f"dualdist: {own}: the ranks did not all call dd.shutdown(): {problem}", file=sys.stderr)


def start_timeline(path: str, world: Group, number: int, about: str) -> TimelineWriter:
    """Start the timeline of this process's `number`th session, from 0; every rank must call this.

    A rank that joined an elastic job later has had fewer sessions than the others, whose earlier traces are kept.
    """
    file = Path(path).absolute()
    number = max(allgather_object(world, number))
    if number:
        file = file.with_stem(f"{file.stem}-{number + 1}")
    return TimelineWriter(file, world, f"rank {world.rank} ({socket.gethostname().partition('.')[0]}, {about})")


def _part_path(path: Path, rank: int) -> Path:
    return path.with_stem(f"{path.stem}.rank-{rank}")


def _write_error(path: Path, reason: str) -> UsageError:
    return UsageError(f"{TIMELINE}={path}: rank 0 cannot write it ({reason}); name another file")

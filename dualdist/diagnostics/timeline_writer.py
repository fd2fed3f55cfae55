"""Timeline file: rank 0 collects all spans and writes it at shutdown; without a shutdown, ranks write part files."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import socket
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualdist.collectives import collectives
from dualdist.collectives.broadcast_state import allgather_object
from dualdist.collectives.group import Group
from dualdist.diagnostics.timeline_events import EventListener
from dualdist.diagnostics.trace_format import (
    TIMELINE,
    ClockModel,
    Event,
    find_write_problem,
    rank_events,
    rank_file,
    trace_document,
)
from dualdist.errors import DualdistError, UsageError
from dualdist.version import __version__

EXCHANGES = 8  # to measure clock offsets

Gather = Callable[[Any], list[Any]]  # all ranks' objects, in rank order


@dataclass(frozen=True)
class ClockOffset:
    """At `at_ns`, a rank's clock was `ns` ± `error_ns` ahead of rank 0's."""

    ns: float
    error_ns: float
    at_ns: int


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
    """Return the largest error of the offsets."""
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
            rank_file(path, world.rank).unlink(missing_ok=True)
            if world.rank == 0:
                _lock_file(path).unlink(missing_ok=True)  # of a run that was killed
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
        self._world.observer = self._world.monitor.observer = None
        try:
            later, _ = measure_offsets(lambda each: allgather_object(self._world, each))
            parts = self._gather_events(self._events(later[self._world.rank]))
        except DualdistError:
            return  # the ranks are out of step: each writes its part at exit
        self._is_written = True
        atexit.unregister(self._write_part)
        if self._world.rank == 0:
            error_ns = max(max_error_ns(self._offsets), max_error_ns(later))
            try:
                self._write(self._path, [event for part in parts for event in part], error_ns)
            except OSError as error:
                raise _write_error(self._path, error.strerror or str(error)) from error

    def _events(self, later: ClockOffset | None = None) -> list[Event]:
        own = self._offsets[self._world.rank]
        clock = ClockModel(self._zero_ns, own.at_ns, own.ns)
        if later is not None:
            clock = ClockModel(self._zero_ns, own.at_ns, own.ns, later.at_ns, later.ns)
        return rank_events(self._world.rank, self._title, self.listener.spans, clock)

    def _gather_events(self, events: list[Event]) -> list[list[Event]]:
        """Return all ranks' events on rank 0, [] elsewhere."""
        world = self._world
        data = zlib.compress(pickle.dumps((events, self.listener.is_full)), 1)
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        splits = [len(packed), *([0] * (world.size - 1))]
        received, sizes = collectives.alltoall(world, packed, splits, world.next_name("timeline")).run()
        if world.rank != 0:
            return []
        found = []
        for piece in received.split(sizes.tolist()):
            part, is_full = pickle.loads(zlib.decompress(piece.numpy().tobytes()))
            found.append(part)
            self.listener.is_full = self.listener.is_full or is_full
        return found

    def _write(self, path: Path, events: Sequence[Event], error_ns: float) -> None:
        metadata: dict[str, Any] = {"dualdist": __version__, "ranks": self._world.size}
        metadata["clocks_apart_us_at_most"] = round(error_ns / 1e3, 3)
        if self.listener.is_full:
            metadata["truncated"] = True
            print(f"dualdist: {path} has the first part of the run only: too many events", file=sys.stderr)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(trace_document(events, **metadata)))
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise

    def _write_part(self, pid: int) -> None:
        """Write this rank's part at exit if shutdown() was not called; the last rank merges the parts."""
        if self._is_written or pid != os.getpid():  # not in a forked child
            return
        self._is_written = True
        self.listener.stop()
        own = rank_file(self._path, self._world.rank)
        try:
            self._write(own, self._events(), max_error_ns(self._offsets))
            problem = "" if self._merge_parts() else f"the last rank to exit merges all parts into {self._path}"
        except OSError as error:
            problem = f"it cannot be written ({error.strerror})"
        if problem:
            print(f"dualdist: {own}: the ranks did not all call dd.shutdown(): {problem}", file=sys.stderr)

    def _merge_parts(self) -> bool:
        """Merge all ranks' parts if they are in one folder; return True if this or another rank does."""
        parts = [rank_file(self._path, rank) for rank in range(self._world.size)]
        if not all(part.exists() for part in parts):
            return not parts[self._world.rank].exists()  # another rank has merged them
        try:
            os.close(os.open(_lock_file(self._path), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True  # another rank is merging
        try:
            events = [event for part in parts for event in json.loads(part.read_text())["traceEvents"]]
            self._write(self._path, events, max_error_ns(self._offsets))
            for part in parts:
                part.unlink(missing_ok=True)
        finally:
            _lock_file(self._path).unlink(missing_ok=True)
        return True


def start_timeline(path: str, world: Group, number: int, **about: Any) -> TimelineWriter:
    """Start the timeline of this process's `number`th session, from 0; every rank must call this.

    A rank that joined an elastic job later has had fewer sessions than the others, whose earlier traces are kept.
    """
    file = Path(path).absolute()
    number = max(allgather_object(world, number))
    if number:
        file = file.with_stem(f"{file.stem}-{number + 1}")
    details = ", ".join(str(value) for value in about.values())
    return TimelineWriter(file, world, f"rank {world.rank} ({socket.gethostname().partition('.')[0]}, {details})")


def _lock_file(path: Path) -> Path:
    """Return the file that exists while a rank merges the parts."""
    return path.with_name(f"{path.name}.joining")


def _write_error(path: Path, reason: str) -> UsageError:
    return UsageError(f"{TIMELINE}={path}: rank 0 cannot write it ({reason}); name another file")

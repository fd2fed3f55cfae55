"""From the ranks' spans to one file: rank 0 collects and writes it at shutdown, or else each rank leaves a part."""

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
from dualdist.collectives.group import Group
from dualdist.collectives.objects import allgather_object
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

EXCHANGES = 8

Gather = Callable[[Any], list[Any]]  # everybody's object, in rank order


@dataclass(frozen=True)
class ClockOffset:
    """A rank's clock was `ns` ahead of rank 0's at `at_ns` of its own, give or take `error_ns`."""

    ns: float
    error_ns: float
    at_ns: int


def measure_offsets(gather: Gather, now: Callable[[], int] = time.monotonic_ns) -> tuple[list[ClockOffset], int]:
    """How far everybody is ahead of rank 0, and what rank 0's clock said last; every rank calls this."""
    most: list[int] = []  # by how much this rank is ahead of each at most
    for _ in range(EXCHANGES):
        sent = gather(now())
        received = now()
        bounds = [received - at for at in sent]
        most = bounds if not most else [min(pair) for pair in zip(most, bounds, strict=True)]
    everybodys = gather((most, now()))
    of_rank_0, zero_ns = everybodys[0]
    told = [offset_between(-of_rank_0[other], row[0], at) for other, (row, at) in enumerate(everybodys)]
    return told, int(zero_ns)


def offset_between(least_ns: int, most_ns: int, at_ns: int) -> ClockOffset:
    """The middle of the bounds, or 0 where that is within them."""
    if least_ns <= 0 <= most_ns:
        return ClockOffset(0.0, float(max(-least_ns, most_ns)), at_ns)
    return ClockOffset((least_ns + most_ns) / 2, (most_ns - least_ns) / 2, at_ns)


def max_error_ns(ahead: Sequence[ClockOffset]) -> float:
    """By how much times of two ranks may be apart wrongly."""
    return max((each.error_ns for each in ahead), default=0.0)


class TimelineWriter:
    """The trace of one session on one rank."""

    def __init__(self, path: Path, world: Group, title: str) -> None:
        """Every rank calls this; UsageError on all of them where rank 0 could not write the file."""
        self.listener = EventListener()
        self._path = path
        self._world = world
        self._title = title
        with contextlib.suppress(OSError):  # of an earlier run: it would be joined with ours
            rank_file(path, world.rank).unlink(missing_ok=True)
            if world.rank == 0:
                _joining(path).unlink(missing_ok=True)  # it was killed then, and nobody would join ours
        problems = allgather_object(world, find_write_problem(path) if world.rank == 0 else "")
        if problems[0]:
            raise _cannot(path, problems[0])
        self._ahead, self._zero_ns = measure_offsets(lambda each: allgather_object(world, each))
        self._is_over = False
        self.listener.observe(world)
        self.listener.start()
        atexit.register(self._leave_part, os.getpid())

    def finish(self) -> None:
        """The file is written, by rank 0, or UsageError there; every rank calls this while all are there."""
        if self._is_over:
            return
        self.listener.stop()
        self._world.observer = self._world.monitor.observer = None
        try:
            later, _ = measure_offsets(lambda each: allgather_object(self._world, each))
            parts = self._gathered(self._events(later[self._world.rank]))
        except DualdistError:
            return  # the ranks are out of step: at exit each leaves what it has seen
        self._is_over = True
        atexit.unregister(self._leave_part)
        if self._world.rank == 0:
            error_ns = max(max_error_ns(self._ahead), max_error_ns(later))
            try:
                self._write(self._path, [event for part in parts for event in part], error_ns)
            except OSError as error:
                raise _cannot(self._path, error.strerror or str(error)) from error

    def _events(self, later: ClockOffset | None = None) -> list[Event]:
        own = self._ahead[self._world.rank]
        clock = ClockModel(self._zero_ns, own.at_ns, own.ns)
        if later is not None:
            clock = ClockModel(self._zero_ns, own.at_ns, own.ns, later.at_ns, later.ns)
        return rank_events(self._world.rank, self._title, self.listener.spans, clock)

    def _gathered(self, events: list[Event]) -> list[list[Event]]:
        """Everybody's events, on rank 0; nothing elsewhere."""
        world = self._world
        data = zlib.compress(pickle.dumps((events, self.listener.is_full)), 1)
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        splits = [len(packed), *([0] * (world.size - 1))]
        received, sizes = collectives.alltoall(world, packed, splits, world.next_name("timeline")).wait()
        if world.rank != 0:
            return []
        found = []
        for piece in received.split(sizes.tolist()):
            part, is_full = pickle.loads(zlib.decompress(piece.numpy().tobytes()))
            found.append(part)
            self.listener.is_full = self.listener.is_full or is_full
        return found

    def _write(self, path: Path, events: Sequence[Event], error_ns: float) -> None:
        about: dict[str, Any] = {"dualdist": __version__, "ranks": self._world.size}
        about["clocks_apart_us_at_most"] = round(error_ns / 1e3, 3)
        if self.listener.is_full:
            about["truncated"] = True
            print(f"dualdist: {path} has the first part of the run only: it became too long", file=sys.stderr)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(trace_document(events, **about)))
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise

    def _leave_part(self, pid: int) -> None:
        """For atexit, where nobody has called shutdown(): this rank's part, and of the last one the whole."""
        if self._is_over or pid != os.getpid():  # not in a process that the program has forked
            return
        self._is_over = True
        self.listener.stop()
        own = rank_file(self._path, self._world.rank)
        try:
            self._write(own, self._events(), max_error_ns(self._ahead))
            left = f"it has what this rank did; the last rank to leave makes {self._path} of all"
            said = "" if self._joined() else left
        except OSError as error:
            said = f"it cannot be written ({error.strerror})"
        if said:
            print(f"dualdist: {own}: the ranks did not come together in dd.shutdown(): {said}", file=sys.stderr)

    def _joined(self) -> bool:
        """Whether the parts of all ranks have become one file, as far as they are in one folder."""
        parts = [rank_file(self._path, rank) for rank in range(self._world.size)]
        if not all(part.exists() for part in parts):
            return not parts[self._world.rank].exists()  # another rank has joined them by now
        try:
            os.close(os.open(_joining(self._path), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True  # another rank is at it
        try:
            events = [event for part in parts for event in json.loads(part.read_text())["traceEvents"]]
            self._write(self._path, events, max_error_ns(self._ahead))
            for part in parts:
                part.unlink(missing_ok=True)
        finally:
            _joining(self._path).unlink(missing_ok=True)
        return True


def start_timeline(path: str, world: Group, number: int, **about: Any) -> TimelineWriter:
    """The timeline of this process's session of that number, the first being 0; every rank calls this.

    A rank that has come later, after a loss, has had fewer sessions than the others, whose earlier traces are kept.
    """
    place = Path(path).absolute()
    number = max(allgather_object(world, number))
    if number:
        place = place.with_stem(f"{place.stem}-{number + 1}")
    told = ", ".join(str(value) for value in about.values())
    return TimelineWriter(place, world, f"rank {world.rank} ({socket.gethostname().partition('.')[0]}, {told})")


def _joining(path: Path) -> Path:
    """It is there while a rank makes one file of all parts."""
    return path.with_name(f"{path.name}.joining")


def _cannot(path: Path, why: str) -> UsageError:
    return UsageError(f"{TIMELINE}={path}: rank 0 cannot write it ({why}); name another file")

"""Horovod's timeline: a Chrome trace of the negotiation and execution of each collective, by tensor.

Gradients are shown by bucket, from the start of the reduction to when this rank sees its end.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import IO, Any

from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.diagnostics.trace_format import process_name_event

# Horovod's names for operations, where they are not the kind in capitals.
PHASES = {"grouped_allreduce": "ALLREDUCE", "grouped_allgather": "ALLGATHER", "grouped_reducescatter": "REDUCESCATTER"}
PREFIXES = {
    "grouped_allreduce": "allreduce",
    "grouped_allgather": "allgather",
    "grouped_reducescatter": "reducescatter",
}


class HorovodTimeline:
    """Writes events to a file as they happen; chrome://tracing also loads the file before close() completes it."""

    def __init__(self, path: str, *, mark_cycles: bool) -> None:
        self._mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._start = time.monotonic()
        self._file: IO[str] | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (open until close())
        self._file.write("[\n")
        since_epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._write({"name": "process_name", "ph": "M", "pid": 0, "args": since_epoch}, first=True)

    def __call__(self, event: str, request: CollectiveRequest | None) -> None:
        """Record an event of a collective; for Group.observer."""
        with self._lock:
            if self._file is None:
                return
            if request is None:
                if self._mark_cycles:
                    self._emit("i", 0, name="CYCLE_START", s="g")
                return
            row = self._row(f"{PREFIXES.get(request.kind, request.kind)}.{request.name}")
            phase = PHASES.get(request.kind, request.kind.upper())
            if event == "entered":
                self._emit("B", row, name=f"NEGOTIATE_{phase}")
            elif event == "agreed":
                self._emit("E", row)
                self._emit("B", row, name=phase)
            else:
                self._emit("E", row)

    def moved(self, event: str, kind: str, name: str, nbytes: int) -> None:
        """Record the reduction of a bucket; for Monitor.observer."""
        with self._lock:
            if self._file is None:
                return
            row = self._row(f"{kind}.{name}")
            if event == "begun":
                self._emit("B", row, name=kind.upper())
            else:
                self._emit("E", row)

    def close(self) -> None:
        """Complete the file and ignore later events."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def _row(self, name: str) -> int:
        """Return the number of a tensor's row, named in the trace when it is new."""
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1
            self._write(process_name_event(self._rows[name], name))
        return self._rows[name]

    def _emit(self, phase: str, row: int, **fields: Any) -> None:
        self._write({"ph": phase, "pid": row, "ts": int((time.monotonic() - self._start) * 1e6), **fields})

    def _write(self, event: dict[str, Any], *, first: bool = False) -> None:
        assert self._file is not None, "callers have looked"
        self._file.write(("" if first else ",\n") + json.dumps(event))
        self._file.flush()

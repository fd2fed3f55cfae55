"""The trace that hvd.start_timeline() writes: Horovod's, of each tensor's negotiation and execution."""

import json
import threading
import time
from pathlib import Path
from typing import IO, Any

from dualdist.collectives.negotiation import CollectiveRequest
from dualdist.engine.channel import Transfer
from dualdist.trace.trace_format import process_name_event


class HorovodTimeline:
    """Horovod's trace of the negotiation and execution of each collective, by tensor, in Chrome's format.

    Gradients are shown by bucket, from the start of the reduction to when this rank sees its end. Events are written as
    they happen; chrome://tracing also loads the file before close() completes it.
    """

    def __init__(self, path: str, *, mark_cycles: bool) -> None:
        self._mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._start = time.monotonic()
        self._file: IO[str] | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (open until close())
        since_epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._file.write("[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": since_epoch}))

    def __call__(self, event: str, request: CollectiveRequest | Transfer | None) -> None:
        """Record an event of a collective, or of the reduction of a bucket: see Channel.observers."""
        with self._lock:
            if isinstance(request, Transfer):
                row = self._row(f"{request.kind}.{request.name}")
                if event == "begun":
                    self._emit("B", row, name=request.kind.upper())
                else:
                    self._emit("E", row)
                return
            if request is None:
                if self._mark_cycles:
                    self._emit("i", 0, name="CYCLE_START", s="g")
                return
            kind = request.kind.removeprefix("grouped_")
            row, phase = self._row(f"{kind}.{request.name}"), kind.upper()
            if event == "entered":
                self._emit("B", row, name=f"NEGOTIATE_{phase}")
            elif event == "agreed":
                self._emit("E", row)
                self._emit("B", row, name=phase)
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

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:  # close() was not called yet
            self._file.write(",\n" + json.dumps(event))
            self._file.flush()

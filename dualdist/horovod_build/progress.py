"""What the user sees while Horovod compiles: one line that changes on a terminal, a few lines elsewhere."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass, field
from typing import TextIO

# make's "[ 42%] Building CXX object ..." as CMake writes it.
PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s+(.*)")
STEP_PERCENT = 10


def percent_of(line: str) -> tuple[int, str] | None:
    """How far the build is and what it does, if the line says so."""
    found = PERCENT.match(line)
    return (int(found[1]), found[2]) if found else None


@dataclass
class Progress:
    """Writes to `stream`; call `line` for each line of output and `done` at the end of a step."""

    stream: TextIO
    started: float = field(default_factory=time.monotonic)
    _shown: int = -STEP_PERCENT
    _open: bool = False

    def say(self, text: str) -> None:
        """A line of its own."""
        self.done()
        print(text, file=self.stream, flush=True)

    def line(self, text: str) -> None:
        """One line of a command's output; shown if it tells how far the build is."""
        found = percent_of(text)
        if found is None:
            return
        percent, doing = found
        if self.stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            shown = f"  {percent:3d}%  {self._elapsed()}  {doing.rsplit('/', 1)[-1]}"[:width]
            print(f"\r{shown:<{width}}", end="", file=self.stream, flush=True)
            self._open = True
        elif percent >= self._shown + STEP_PERCENT:
            self._shown = percent - percent % STEP_PERCENT
            print(f"  {percent:3d}%  {self._elapsed()}", file=self.stream, flush=True)

    def done(self) -> None:
        """The changing line, if there is one, is ended."""
        if self._open:
            print(file=self.stream, flush=True)
        self._open, self._shown = False, -STEP_PERCENT

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self.started)
        return f"{seconds // 60}:{seconds % 60:02d}"

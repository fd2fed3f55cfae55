"""Relay the output of a process to files, line by line if lines are changed on the way."""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable, Sequence

CHUNK = 1 << 16
# Bytes held back of a line without an end, such as a progress bar's.
LONGEST_LINE = 1 << 14
# After a newline, or after the carriage return by which a progress bar rewrites its line.
LINE_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


class OutputRelay:
    """Copy a pipe to some files; when no target is left the pipe is closed, so that its writer gets SIGPIPE.

    Args:
        tag: put before each line.
        strip: a pattern that is removed from the start of each line.
        keep: how many of the last bytes stay in `tail`, unchanged.
        on_read: called with each chunk before it is written.
    """

    def __init__(
        self,
        source: int,
        targets: Sequence[int],
        *,
        tag: str = "",
        strip: str = "",
        keep: int = 0,
        on_read: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        os.set_blocking(source, False)
        self.source = source
        self.tail = b""
        self.is_open = True
        self._targets = list(targets)
        self._tag = tag.encode()
        self._strip = re.compile(rb"\A(?:" + strip.encode() + rb")") if strip else None
        self._keep = keep
        self._on_read = on_read
        self._line = b""

    def pump(self) -> bytes:
        """Copy and return what is available, at most about CHUNK bytes; close the relay at the end of the source."""
        found, has_ended = b"", False
        while self.is_open and not has_ended and len(found) < CHUNK:
            try:
                chunk = os.read(self.source, CHUNK)
            except BlockingIOError:
                break
            found += chunk
            has_ended = not chunk
        if self._keep:
            self.tail = (self.tail + found)[-self._keep :]
        if found:
            self._on_read(found)
            self._pass_on(found)
        if has_ended:
            self.close()
        return found

    def close(self) -> None:
        """Write the incomplete last line, and close the source."""
        if self.is_open:
            self.is_open = False
            self._write(self._format([self._line]) if self._line else b"")
            os.close(self.source)

    def _pass_on(self, chunk: bytes) -> None:
        if not (self._tag or self._strip):
            self._write(chunk)
            return
        *lines, self._line = LINE_ENDS.split(self._line + chunk)
        if len(self._line) > LONGEST_LINE:
            lines, self._line = [*lines, self._line], b""
        self._write(self._format(lines))

    def _format(self, lines: Sequence[bytes]) -> bytes:
        """Strip and tag the lines, and end each, so that no two ranks share one."""
        texts = [line.rstrip(b"\r\n") for line in lines]
        if self._strip is not None:
            texts = [self._strip.sub(b"", text, count=1) for text in texts]
        return b"".join(self._tag + text + b"\n" for text in texts)

    def _write(self, data: bytes) -> None:
        for target in tuple(self._targets):
            try:
                write_all(target, data)
            except OSError:
                self._targets.remove(target)
        if data and not self._targets and self.is_open:
            self.is_open = False
            with contextlib.suppress(OSError):
                os.close(self.source)


def write_all(target: int, data: bytes) -> None:
    """Write all of the data, even if the file is nonblocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            select.select([], [target], [])

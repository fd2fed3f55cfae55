"""Relay the output of a process to files, by whole lines: ranks may share a file."""

import contextlib
import os
import re
import select
import selectors
import time
from collections.abc import Callable, Iterator, Sequence

CHUNK = 1 << 16
# Bytes held back of a line without an end, such as a progress bar's.
LONGEST_LINE = 1 << 14
# Seconds after which an incomplete line is written as it is, unless lines are changed on the way.
PARTIAL_S = 0.1
# Bytes that a pipe takes without writes of other processes in between, and what frames each write of a rank.
ATOMIC = select.PIPE_BUF
FRAME, BEGIN, END = re.compile(rb"\x1e([^\x1f]*)\x1f"), b"\x1e", b"\x1f"
# After a newline, or after the carriage return by which a progress bar rewrites its line.
LINE_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


class OutputRelay:
    """Copy a pipe to some files; when no target is left the pipe is closed, so that its writer gets SIGPIPE.

    Args:
        tag: put before each line.
        strip: a pattern that is removed from the start of each line.
        framed: the target to which each write is put between BEGIN and END. A launcher writes to the same file, and who
            reads that can then tell its words from those of ranks.
        hides_unframed: the source has such frames. They are removed, and what stands between them is dropped while this
            returns True.
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
        framed: int | None = None,
        hides_unframed: Callable[[], bool] | None = None,
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
        self._framed = framed
        self._hides_unframed = hides_unframed
        self._keep = keep
        self._on_read = on_read
        self._line = b""
        self._partial_at = 0.0

    def pump(self) -> None:
        """Copy what is available, at most CHUNK bytes; close the relay at the end of the source."""
        try:
            chunk = os.read(self.source, CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.close()
            return
        if self._keep:
            self.tail = (self.tail + chunk)[-self._keep :]
        self._on_read(chunk)
        self._pass_on(chunk)

    def pump_into(self, selector: selectors.BaseSelector) -> None:
        """Call pump(), and unregister the source from the selector at its end."""
        source = self.source
        self.pump()
        if not self.is_open:
            selector.unregister(source)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._write(self._format([self._line]) if self._line else b"")
            os.close(self.source)

    @property
    def has_partial_line(self) -> bool:
        """Return True if flush_partial_line() may have something to write."""
        return bool(self._line) and not (self._tag or self._strip or self._hides_unframed)

    def flush_partial_line(self) -> None:
        """Write an incomplete line, such as a prompt's, if it has waited for its end long enough."""
        if self.has_partial_line and time.monotonic() >= self._partial_at + PARTIAL_S:
            line, self._line = self._line, b""
            self._write(line)

    def _pass_on(self, chunk: bytes) -> None:
        if self._hides_unframed is not None:
            self._write(self._unframe(chunk, hides_unframed=self._hides_unframed()))
            return
        is_first, text = not self._line, self._line + chunk
        if self._tag or self._strip:
            *lines, self._line = LINE_ENDS.split(text)
        else:
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            lines, self._line = ([text[:end]] if end else []), text[end:]
        if lines or is_first:
            self._partial_at = time.monotonic()
        if len(self._line) > LONGEST_LINE:
            lines, self._line = [*lines, self._line], b""
        self._write(self._format(lines))

    def _unframe(self, chunk: bytes, *, hides_unframed: bool) -> bytes:
        text, end, found = self._line + chunk, 0, []
        for frame in FRAME.finditer(text):
            found += [frame[1]] if hides_unframed else [text[end : frame.start()], frame[1]]
            end = frame.end()
        rest, begin, cut = text[end:].partition(BEGIN)
        self._line = begin + cut
        return b"".join(found if hides_unframed else [*found, rest])

    def _format(self, lines: Sequence[bytes]) -> bytes:
        """Strip and tag the lines, and end each, so that no two ranks share one."""
        if not (self._tag or self._strip):
            return b"".join(lines)
        texts = [line.rstrip(b"\r\n") for line in lines]
        if self._strip is not None:
            texts = [self._strip.sub(b"", text, count=1) for text in texts]
        return b"".join(self._tag + text + b"\n" for text in texts)

    def _write(self, data: bytes) -> None:
        for piece in _pieces(data):
            for target in tuple(self._targets):
                try:
                    write_all(target, _frame(piece) if target == self._framed else piece)
                except OSError:
                    self._targets.remove(target)
        if data and not self._targets and self.is_open:
            self.is_open = False
            with contextlib.suppress(OSError):
                os.close(self.source)


def _frame(piece: bytes) -> bytes:
    return BEGIN + piece.translate(None, BEGIN + END) + END


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield whole lines, as many at once as other ranks cannot write into."""
    most = ATOMIC - 2  # the frame
    while len(data) > most:
        cut = data.rfind(b"\n", 0, most) + 1 or most
        yield data[:cut]
        data = data[cut:]
    if data:
        yield data


def write_all(target: int, data: bytes) -> None:
    """Write all of the data, even if the file is nonblocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            select.select([], [target], [])

"""Run the build's commands: output, progress, timeouts, and explanations of failures."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from dualdist.errors import BuildError
from dualdist.horovod_build.plan import BuildCommand
from dualdist.utils.deadline import Deadline, LineReader

# pip's retries and final errors without a reachable index.
NETWORK = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|Name or service not known|Connection refused|"
    r"Network is unreachable|ReadTimeout|ConnectTimeout|Max retries exceeded|ProxyError|SSLError|Retrying \(Retry"
)
NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version")
NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
NO_MEMORY = re.compile(r"Killed signal terminated program|internal compiler error: Killed|virtual memory exhausted")
# The first match shows the error; later ones are mostly its consequences.
FIRST_ERROR = re.compile(
    r"\berror:|CMake Error|undefined reference|cannot find -l|^\s*\w*Error: |^ERROR: ", re.IGNORECASE
)
SHOWN_LINES = 6
SHOWN_WIDTH = 300
# In this order: pip ends in the same way without a network and for a version that does not exist.
CAUSES = (
    (NO_SPACE, " for lack of disk space: free some, or set TMPDIR to a folder on another disk"),
    (NO_MEMORY, " for lack of memory: close other programs, or type: dualdist install-horovod --jobs 1"),
    (
        NETWORK,
        " because the package index did not answer: check the network and pip's settings (pip config list); without a "
        "network, set PIP_FIND_LINKS to a folder with the sdist",
    ),
    (NOT_FOUND, " because the package index has no such version: leave out --version, or see `pip config list`"),
)
# make's "[ 42%] Building CXX object ...", as CMake prints it.
PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s")
STEP_PERCENT = 10


def explain_failure(lines: Sequence[str], title: str) -> str:
    """Return the cause of a failure and the output lines that show it."""
    text = "\n".join(lines)
    pattern, reason = next((cause for cause in CAUSES if cause[0].search(text)), (FIRST_ERROR, ""))
    shown = (f"    {line.strip()[:SHOWN_WIDTH]}" for line in error_lines(lines, pattern))
    return "\n".join((f"{title} failed{reason}", *shown))


def error_lines(lines: Sequence[str], pattern: re.Pattern[str] = FIRST_ERROR) -> list[str]:
    """Return the first match of the pattern and the lines after it, or the last lines."""
    first = next((i for i, line in enumerate(lines) if pattern.search(line)), None)
    chosen = lines[-SHOWN_LINES:] if first is None else lines[first : first + SHOWN_LINES]
    return [line for line in chosen if line.strip()]


def run_command(
    command: BuildCommand,
    environ: Mapping[str, str],
    *,
    title: str,
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
    timeout_s: float = math.inf,
) -> list[str]:
    """Run a command, append its output to `log`, and return its lines; raise BuildError if it fails or times out."""
    lines: list[str] = []
    try:
        with log.open("a", encoding="utf-8") as file:
            print(f"$ {command}", file=file, flush=True)

            def receive(line: str) -> None:
                lines.append(line.rstrip("\n"))
                file.write(line)
                on_line(line)

            code = _stream(command, environ, timeout_s, receive)
    except OSError as error:
        raise BuildError(f"{title} failed: {error}") from error
    if code is None:
        raise BuildError(f"{title} did not end within {timeout_s:g} s; its output is in {log}")
    if code != 0:
        raise BuildError(f"{explain_failure(lines, title)}\n  the full output is in {log}")
    return lines


def _stream(
    command: BuildCommand, environ: Mapping[str, str], timeout_s: float, receive: Callable[[str], None]
) -> int | None:
    """Return the exit code, or None after a timeout; the whole process group ends with this call."""
    process = subprocess.Popen(
        command.argv,
        env=command_environ(command, environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    deadline, output = Deadline(timeout_s), LineReader(process.stdout.fileno())
    with process:
        try:
            while line := output.readline(deadline):
                receive(line.decode(errors="replace"))
            return process.wait(min(deadline.left_s(), threading.TIMEOUT_MAX))
        except (TimeoutError, subprocess.TimeoutExpired):
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def command_environ(command: BuildCommand, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the command's variables, without those it removes."""
    changed = dict(command.variables)
    return {name: value for name, value in {**environ, **changed}.items() if value or name not in changed}


def unpack(archive: Path, folder: Path) -> None:
    """Extract an sdist into the folder."""
    try:
        with tarfile.open(archive) as files:
            if hasattr(tarfile, "data_filter"):
                files.extractall(folder, filter="data")
            else:
                files.extractall(folder)
    except (OSError, tarfile.TarError) as error:
        raise BuildError(f"{archive.name} could not be unpacked in {folder}: {error}") from error


@dataclass
class BuildProgress:
    """Prints the steps to `stream`, and every 10% of a compilation."""

    stream: TextIO
    started: float = field(default_factory=time.monotonic)
    _next_percent: int = 0

    def print(self, text: str) -> None:
        """Print a line."""
        print(text, file=self.stream, flush=True)

    def on_line(self, line: str) -> None:
        """Print the percentage and the elapsed time if `line` is make's output and another 10% are reached."""
        match = PERCENT.match(line)
        percent = int(match[1]) if match else -1
        if percent >= self._next_percent:
            self._next_percent = percent - percent % STEP_PERCENT + STEP_PERCENT
            seconds = int(time.monotonic() - self.started)
            self.print(f"  {percent:3d}%  {seconds // 60}:{seconds % 60:02d}")

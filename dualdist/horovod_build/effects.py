"""The only processes that install-horovod starts and the only files it unpacks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dualdist.errors import BuildError
from dualdist.horovod_build.plan import BuildCommand

# pip's retries and final errors where the index did not answer.
NETWORK = re.compile(
    r"NewConnectionError|Temporary failure in name resolution|Name or service not known|Connection refused|"
    r"Network is unreachable|ReadTimeout|ConnectTimeout|Max retries exceeded|ProxyError|SSLError|Retrying \(Retry"
)
NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version")
NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
NO_MEMORY = re.compile(r"Killed signal terminated program|internal compiler error: Killed|virtual memory exhausted")
# The first of these says what went wrong; what follows is mostly its consequence.
FIRST_ERROR = re.compile(
    r"\berror:|CMake Error|undefined reference|cannot find -l|^\s*\w*Error: |^ERROR: ", re.IGNORECASE
)
SHOWN_LINES = 6
SHOWN_WIDTH = 300
# The first that is found in the output is the cause: pip ends alike for a dead network and for a wrong name.
CAUSES = (
    (NO_SPACE, " for lack of disk space: make room, or name a folder on another disk in TMPDIR"),
    (NO_MEMORY, " for lack of memory: close other programs, or type: dualdist install-horovod --jobs 1"),
    (
        NETWORK,
        " because the package index did not answer: check the network and pip's settings (pip config list); "
        "without a network, put the sdist in a folder and name that in the variable PIP_FIND_LINKS",
    ),
    (
        NOT_FOUND,
        " because the package index has no such version: leave out --version, or check pip's settings "
        "(pip config list)",
    ),
)


def explain(lines: Sequence[str], what: str) -> str:
    """One sentence on why `what` failed, then the output's lines that show it."""
    text = "\n".join(lines)
    pattern, reason = next(((pattern, reason) for pattern, reason in CAUSES if pattern.search(text)), (FIRST_ERROR, ""))
    return "\n".join(
        (f"{what} failed{reason}", *(f"    {line.strip()[:SHOWN_WIDTH]}" for line in telling_lines(lines, pattern)))
    )


def telling_lines(lines: Sequence[str], pattern: re.Pattern[str] = FIRST_ERROR) -> list[str]:
    """The first line of the pattern and what follows it; the last lines where there is none."""
    first = next((i for i, line in enumerate(lines) if pattern.search(line)), None)
    chosen = lines[-SHOWN_LINES:] if first is None else lines[first : first + SHOWN_LINES]
    return [line for line in chosen if line.strip()]


def run(
    command: BuildCommand,
    environ: Mapping[str, str],
    *,
    what: str,
    log: Path,
    see: Callable[[str], None] = lambda line: None,
    timeout_s: float | None = None,
) -> list[str]:
    """The command's output, line by line as it came; BuildError naming the log if it failed or took too long."""
    lines: list[str] = []
    try:
        with log.open("a", encoding="utf-8") as record:
            print(f"$ {command}", file=record, flush=True)
            code = _stream(command, environ, timeout_s, lambda line: _note(line, lines, record.write, see))
    except OSError as error:
        raise BuildError(f"{what} failed: {error}") from error
    if code is None:
        raise BuildError(f"{what} did not end within {timeout_s:g} s; its output is in {log}")
    if code != 0:
        raise BuildError(f"{explain(lines, what)}\n  the full output is in {log}")
    return lines


def _note(line: str, lines: list[str], write: Callable[[str], object], see: Callable[[str], None]) -> None:
    lines.append(line.rstrip("\n"))
    write(line)
    see(line)


def _stream(
    command: BuildCommand, environ: Mapping[str, str], timeout_s: float | None, note: Callable[[str], None]
) -> int | None:
    """The exit code; None if it was stopped for taking too long. The whole process group ends with this call."""
    process = subprocess.Popen(
        command.argv,
        env=environment(command, environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        _kill_group(process)

    timer = threading.Timer(timeout_s, stop) if timeout_s else None
    try:
        if timer:
            timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            note(line)
        code = process.wait()
    finally:
        if timer:
            timer.cancel()
        _kill_group(process)
        process.wait()
    return None if late.is_set() else code


def environment(command: BuildCommand, environ: Mapping[str, str]) -> dict[str, str]:
    """The user's variables with the command's in them."""
    changed = dict(command.variables)
    return {name: value for name, value in {**environ, **changed}.items() if value or name not in changed}


def _kill_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def unpack(archive: Path, folder: Path) -> None:
    """The sdist's files lie in the folder."""
    try:
        with tarfile.open(archive) as files:
            if hasattr(tarfile, "data_filter"):
                files.extractall(folder, filter="data")
            else:
                files.extractall(folder)
    except (OSError, tarfile.TarError) as error:
        raise BuildError(f"{archive.name} could not be unpacked in {folder}: {error}") from error

"""Leaks of a test: environment variables, child processes and threads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness.guard import command_lines

SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 10.0
"""Seconds that processes and threads of a test may take to end."""
# Set by pytest, and by torch when its compiler is first imported.
LIBRARIES_OWN = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
LONG_LIVED: set[int] = set()
"""Process ids of jobs that outlive the test that started them; who adds one must end it."""
# Processes that live as long as the interpreter.
LIFELONG = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")


@dataclass(frozen=True)
class Snapshot:
    environ: dict[str, str]
    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(dict(os.environ), frozenset(_descendants()), frozenset(_threads()))

    def restore_environ(self) -> None:
        for name in set(os.environ) - set(self.environ) - LIBRARIES_OWN:
            del os.environ[name]
        os.environ.update({k: v for k, v in self.environ.items() if k not in LIBRARIES_OWN})

    def leaks(self) -> list[str]:
        """Return a line per leak, after a short wait for those that are ending."""
        return [*self._variables(), *self._processes(), *self._threads()]

    def _variables(self) -> Iterator[str]:
        for name in sorted((set(os.environ) | set(self.environ)) - LIBRARIES_OWN):
            before, after = self.environ.get(name), os.environ.get(name)
            if before != after:
                yield f"variable {name} was {before!r}, is {after!r}"

    def _processes(self) -> Iterator[str]:
        children = set(_descendants()) - self.processes - _long_lived()
        new = [process for process in children if not _is_lifelong(process)]
        _, alive = psutil.wait_procs(new, timeout=SETTLE_S)
        yield from (f"process {line}" for line in command_lines(alive))
        for process in alive:
            process.kill()

    def _threads(self) -> Iterator[str]:
        deadline = time.monotonic() + SETTLE_S
        for thread in set(_threads()) - self.threads:
            thread.join(max(0, deadline - time.monotonic()))
            if thread.is_alive():
                yield f"thread {thread.name}"


def shared_memory() -> frozenset[str]:
    """Return the names of all files in shared memory except multiprocessing's semaphores.

    multiprocessing's resource tracker removes those, and fault tests kill it with the ranks.
    """
    names = (path.name for path in SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else ()
    return frozenset(name for name in names if not name.startswith("sem.mp-"))


def unused(names: Iterable[str]) -> list[str]:
    """Return the names of files in shared memory that no running process has mapped."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps.append(path.read_text())
    mapped = "".join(maps)
    return sorted(name for name in names if str(SHARED_MEMORY / name) not in mapped)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.daemon]


def _descendants() -> list[psutil.Process]:
    """Return all descendants; a fast check of this process's threads for children comes first."""
    children = (path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return psutil.Process().children(recursive=True) if any(children) else []


def _long_lived() -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in LONG_LIVED:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    return found


def _is_lifelong(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or any(name in " ".join(process.cmdline()) for name in LIFELONG)
    except psutil.NoSuchProcess:
        return True

"""Rank status: what each rank of a running job does, for `dualdist top`; nothing is measured while nobody looks.

Note [who may look]: each rank listens at a Unix socket in Linux's abstract namespace, whose name says which job, rank
and process it is of. So there is no file that a killed job leaves behind, and /proc/net/unix lists the jobs of a host.
Both sides ask the kernel for the other's user, and close the connection if it is not their own.

Note [other hosts]: a rank of this host asks the ranks of other hosts by the rank probe, which answers within a second.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualdist.errors import RendezvousError
from dualdist.liveness.process_state import (
    ENDED,
    NOT_RUNNING,
    OUR_THREADS,
    Line,
    identify,
    program_thread,
    thread_stack,
)
from dualdist.utils.unix_peer import connect_to_own, is_own

if TYPE_CHECKING:
    from dualdist.liveness.rank_probe import RankProbe
    from dualdist.topology import Topology

# The name of a socket: user, number and size of the job, rank, process, and when its session began; in SOCKETS after @.
NAME = "\0dualdist-top/{}/{}/{}/{}/{}/{}"
LISTED = re.compile(r"@dualdist-top/(\d+)/(\d+)/(\d+)/(\d+)/(\d+)/(\d+)$", re.MULTILINE)
SOCKETS = "/proc/net/unix"  # proc(5)
# Seconds between two samples of a rank that is watched, and in which a connected peer sends its request.
SAMPLE_S, REQUEST_S = 0.02, 2.0
# Seconds in which a rank answers, beyond those that it watches, and ranks of other hosts by the store.
ANSWER_S, OTHERS_S = 2.0, 5.0
RECEIVED_BYTES = 1 << 16
NO_ANSWER = "does not answer: exited, stopped, or in C code that holds the GIL"
NO_STORE = "does not answer, nor does the store of the job, which rank 0 or its launcher serves"
NOT_ASKED = "is on another host, and no rank of this host answers and could ask it: look there"
# Ranks are late if others waited for this share of the time more than they.
LATE = 0.2


@dataclass(frozen=True)
class RankStatus:
    """The activity of a rank, now and while it was watched.

    Attributes:
        steps: Reductions of gradients since dd.init().
        step_s: Time between two of them; None before two were seen.
        waited: The share of the time watched that it was in operations.
        operation: In which it is, "" in the program.
        seconds: For how long it has been there, if that is known.
        stack: Of the program, the innermost call last.
        cores: CPU time over time.
    """

    rank: int
    host: str
    pid: int
    launcher: str
    steps: int
    step_s: float | None
    waited: float
    operation: str
    seconds: float | None
    stack: Sequence[Line]
    memory_bytes: int
    cores: float


class StatusServer:
    """Answers about this rank, and asks other ranks for this host: Note [who may look]. `steps` returns their number.

    `number` is the job's: the process id of rank 0.
    """

    def __init__(self, topology: Topology, number: int, probe: RankProbe | None, steps: Callable[[], int]):
        self._topology = topology
        self._probe = probe
        self._steps = steps
        self._changes: list[tuple[float, int]] = []  # when a watched number of steps has changed
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        place = number, topology.size, topology.rank, os.getpid(), time.monotonic_ns()
        with contextlib.suppress(OSError):  # a sandbox without such sockets: nobody can look
            self._listener.bind(NAME.format(os.getuid(), *place))
            self._listener.listen(socket.SOMAXCONN)
            self._start(self._accept)
        if probe is not None:
            probe.on_report_wanted = self._report
        # As in RankProbe: a thread that uses the store must not outlive the interpreter.
        atexit.register(self.close)

    def close(self) -> None:
        """Answer no more; a forked child leaves the socket to its parent."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listener.close()
        for thread in self._threads.copy():
            thread.join(REQUEST_S)

    def _start(self, run: Callable[[], None]) -> None:
        def remove_at_end() -> None:
            with contextlib.suppress(OSError, ValueError, RendezvousError):  # the peer, or the store, has gone
                run()
            self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=remove_at_end, name=f"{OUR_THREADS}status", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection = self._listener.accept()[0]
            except OSError:  # closed, or no file descriptor is left
                self._stop.wait(1.0)
                continue
            if is_own(connection):
                self._start(lambda connection=connection: self._answer(connection))  # type: ignore[misc]
            else:
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(REQUEST_S)
            seconds, ranks = json.loads(connection.recv(RECEIVED_BYTES))
            answer = self._ask_others(seconds, ranks) if ranks else asdict(self.watch(seconds))
            if not self._stop.is_set():
                connection.sendall(json.dumps(answer).encode())

    def _ask_others(self, seconds: float, ranks: Sequence[int]) -> dict[int, Any]:
        probe = self._probe
        assert probe is not None, "a job of one rank has no others"
        found = probe.collect_reports(seconds, ranks, self._stop)
        return {rank: json.loads(text) for rank, text in found.items()}

    def _report(self, seconds: float, send: Callable[[str], None]) -> None:
        """Report in a thread, when another rank asks by the probe."""

        def report() -> None:
            text = json.dumps(asdict(self.watch(seconds)))
            if not self._stop.is_set():
                send(text)

        self._start(report)

    def watch(self, seconds: float) -> RankStatus:
        """Return what this rank does, after watching it for so many seconds."""
        began, cpu_s, steps = time.monotonic(), time.process_time(), self._steps()
        until, samples, waits = began + seconds, 0, 0
        self._changes = self._changes[-2:]
        while True:
            samples += 1
            waits += self._probe is not None and bool(self._probe.awaited())
            if self._steps() != steps:
                steps = self._steps()
                self._changes.append((time.monotonic(), steps))
            if time.monotonic() >= until or self._stop.wait(SAMPLE_S):
                break
        operation, since, stack = self._position()
        now = time.monotonic()
        return RankStatus(
            rank=self._topology.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            launcher=self._topology.launcher,
            steps=steps,
            step_s=_time_per_step(self._changes, began),
            waited=waits / samples,
            operation=operation,
            seconds=None if since is None else now - since,
            stack=stack,
            memory_bytes=_resident_bytes(),
            cores=(time.process_time() - cpu_s) / max(now - began, SAMPLE_S),
        )

    def _position(self) -> tuple[str, float | None, list[Line]]:
        if self._probe is None:
            return "", None, thread_stack(program_thread(), is_in_operation=False)
        operation, since, stack = self._probe.position()
        if not operation and (awaited := self._probe.awaited()):
            return awaited, None, stack
        return operation, since, stack


def _time_per_step(changes: Sequence[tuple[float, int]], began: float) -> float | None:
    """Return the time per step since `began`, or since an earlier look if only one was taken since."""
    recent = [change for change in changes if change[0] >= began]
    known = recent if len(recent) > 1 else changes[-2:]
    if len(known) < 2:
        return None
    (first_at, first), (last_at, last) = known[0], known[-1]
    return (last_at - first_at) / (last - first) if last > first else None


def _resident_bytes() -> int:
    """Return the memory of this process (proc(5): the second field of statm is in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class RunningJob:
    """A job with ranks on this host: its number, the number of all its ranks, and process and socket of those here."""

    number: int
    size: int
    pids: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def program(self) -> list[str]:
        """Return the command line of the lowest rank here."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pids[min(self.pids)]}/cmdline").read_bytes().decode(errors="replace")
            return text.rstrip("\0").split("\0")
        return []


def find_jobs() -> dict[int, RunningJob]:
    """Return this user's running jobs with ranks on this host, by number."""
    listed = {tuple(map(int, found)) for found in LISTED.findall(Path(SOCKETS).read_text(errors="replace"))}
    jobs: dict[int, RunningJob] = {}
    for user, number, size, rank, pid, began in sorted(listed, key=lambda each: each[-1]):
        name = NAME.format(user, number, size, rank, pid, began)
        # A child may hold the socket of a process that has ended, or of its former session.
        if user == os.getuid() and Path(f"/proc/{pid}").exists() and (connection := connect_to_own(name)) is not None:
            connection.close()
            job = jobs.setdefault(number, RunningJob(number, size))
            job.pids[rank], job.names[rank] = pid, name
    return jobs


def look(job: RunningJob, seconds: float) -> dict[int, RankStatus | str]:
    """Return the status of each rank after watching it, or why it has none; {} if the job has ended."""
    elsewhere = sorted({*range(job.size)} - {*job.names})
    with ThreadPoolExecutor(len(job.names) + 1) as pool:
        others = pool.submit(_ask_elsewhere, job, elsewhere, seconds) if elsewhere else None
        here = dict(zip(job.names, pool.map(lambda rank: _ask_here(job, rank, seconds), job.names), strict=True))
    if all(each == ENDED for each in here.values()):
        return {}
    return dict(sorted({**here, **(others.result() if others else {})}.items()))


def _ask_here(job: RunningJob, rank: int, seconds: float) -> RankStatus | str:
    """Return the status of a rank of this host, or what its process does instead of answering."""
    process = identify(job.pids[rank])
    state = process.state()
    try:
        if state not in NOT_RUNNING:
            return RankStatus(**_ask(job.names[rank], seconds))
    except TimeoutError:
        state = process.state()
    except (ConnectionError, ValueError):
        state = ENDED
    except TypeError:  # fields of another version
        return "runs another version of dualdist"
    return ENDED if state == ENDED else f"does not answer: its process {process.pid} {state}"


def _ask_elsewhere(job: RunningJob, ranks: Sequence[int], seconds: float) -> dict[int, RankStatus | str]:
    """Return the status of ranks that are not on this host, by one that is and answers: Note [other hosts]."""
    relay = next((rank for rank in job.names if isinstance(_ask_here(job, rank, 0.0), RankStatus)), None)
    if relay is None:
        return dict.fromkeys(ranks, NOT_ASKED)
    try:
        found = _ask(job.names[relay], seconds, ranks)
    except (OSError, ValueError):
        return dict.fromkeys(ranks, NO_STORE)
    return {rank: RankStatus(**found[str(rank)]) if str(rank) in found else NO_ANSWER for rank in ranks}


def _ask(name: str, seconds: float, ranks: Sequence[int] = ()) -> dict[str, Any]:
    """Return the answer of the rank that listens at a name; OSError if there is none, ValueError if it is cut off."""
    connection = connect_to_own(name)
    if connection is None:
        raise ConnectionRefusedError(name)
    with connection:
        connection.settimeout(seconds + (OTHERS_S if ranks else ANSWER_S))
        connection.sendall(json.dumps([seconds, [*ranks]]).encode())
        answer = b"".join(iter(lambda: connection.recv(RECEIVED_BYTES), b""))
    found: dict[str, Any] = json.loads(answer)
    return found


def late_ranks(found: Mapping[int, RankStatus | str]) -> set[int]:
    """Return the ranks for which others wait: those that do not answer, and those that waited least, if others did."""
    late = {rank for rank, status in found.items() if isinstance(status, str) and status not in (NOT_ASKED, NO_STORE)}
    waited = {rank: status.waited for rank, status in found.items() if isinstance(status, RankStatus)}
    if late or not waited or max(waited.values()) < min(waited.values()) + LATE:
        return late
    return {rank for rank, share in waited.items() if share < min(waited.values()) + LATE / 2}

"""Peers that are no ranks send garbage to every port of a job, or nothing for long: the job goes on undisturbed."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest
from faults import training
from faults.starts import RANK, Cell, rank_env
from harness.effort import Effort
from harness.jobs import REPORT_DIR, Job, Launch, collect

LIMIT_S = 120.0
PACE_S = "0.1"
# torch's store looks up the name of every peer, and does nothing else until the resolver gives up, after 5 s a try.
TIMEOUT_S = "30"
CELLS = [
    Cell("run-torchrun", "native", "gloo"),
    Cell("torchrun", "horovod", "gloo"),
    Cell("torchrun", "native", "gloo"),
    Cell("run-spawn", "native", "shm"),
    Cell("spawn", "native", "gloo"),
    Cell("horovodrun", "native", "shm"),
    Cell("horovodrun", "horovod", "gloo"),
    Cell("run-horovodrun", "horovod", "gloo"),
]
CONNECT_S = 1.0
LOOK_S = 0.1
# Connections that stay open at each port and send nothing, or a byte now and then (as slowpeer does).
SLOW_PEERS = 25
# torch/csrc/distributed/c10d/TCPStoreBackend.hpp: the queries of its store, of which the first is followed by this.
VALIDATE, MAGIC = 0, struct.pack("<I", 0x3C85F7CE)
HUGE = struct.pack("<Q", 1 << 60)
DRAWS = random.Random(17)


def _queries() -> Iterator[bytes]:
    """Yield what a client of torch's store sends, cut short, too long, or impossible."""
    yield bytes([VALIDATE]) + b"\xff" * 4
    yield bytes([VALIDATE])
    for query in range(1, 20):
        yield bytes([VALIDATE]) + MAGIC + bytes([query])
        yield bytes([VALIDATE]) + MAGIC + bytes([query]) + HUGE
        yield bytes([VALIDATE]) + MAGIC + bytes([query]) + b"\xff" * 64
        yield bytes([VALIDATE]) + MAGIC + bytes([query]) + struct.pack("<Q", 3) + b"key" + HUGE


def _garbage() -> Iterator[bytes]:
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"PUT /dualdist/rank0 HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx"
    yield b"PUT /" + b"a" * 100_000
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + DRAWS.randbytes(200)  # TLS
    yield b"[" * 200_000 + b"\n"  # JSON
    yield b'{"token": "", "rank": 0, "host": "x", "round": 0}\n' * 3
    yield b"\0" * 65536
    yield b"\xff" * 65536
    for size in (1, 4, 8, 16, 100, 5000):
        yield DRAWS.randbytes(size)
    yield from _queries()


MESSAGES = list(_garbage())


def _send(port: int, message: bytes, *, abruptly: bool) -> None:
    """Send the message and disconnect, in order or by a reset."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), CONNECT_S) as peer:
        peer.settimeout(CONNECT_S)
        peer.sendall(message)
        if abruptly:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(0.02)
            peer.recv(1 << 16)


class Strangers:
    """Send garbage to every port that `ports` returns, until stop()."""

    def __init__(self, ports: Callable[[], set[int]]) -> None:
        self._ports = ports
        self._is_stopping = threading.Event()
        self._slow_peers: list[socket.socket] = []
        self.met: set[int] = set()
        self.sent = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._thread.join()
        for peer in self._slow_peers:
            peer.close()

    def _run(self) -> None:
        while not self._is_stopping.wait(LOOK_S):
            for port in self._ports() - self.met:
                self.met.add(port)
                self._connect_slow_peers(port)
                for message in DRAWS.sample(MESSAGES, len(MESSAGES)):
                    if self._is_stopping.is_set():
                        return
                    _send(port, message, abruptly=DRAWS.random() < 0.3)
                    self.sent += 1
            for peer in self._slow_peers:
                with contextlib.suppress(OSError):
                    peer.send(DRAWS.randbytes(1)) if DRAWS.random() < 0.1 else None

    def _connect_slow_peers(self, port: int) -> None:
        for _ in range(SLOW_PEERS):
            with contextlib.suppress(OSError):
                peer = socket.create_connection(("127.0.0.1", port), CONNECT_S)
                peer.setblocking(False)
                self._slow_peers.append(peer)


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which the descendants of a process listen."""
    ports: set[int] = set()
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found = process.net_connections("tcp")
                ports.update(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN)
    return ports


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_garbage_at_every_port_does_not_disturb_a_training(launch: Launch, cell: Cell, effort: Effort) -> None:
    effort.require_long(unless=False)  # half a minute each
    folder = launch.directory / "reports"
    folder.mkdir()
    argv = cell.argv(training.__file__, str(launch.directory), "", PACE_S, TIMEOUT_S)

    def ports() -> set[int]:
        """Return none before the ranks have met: until then Horovod's Gloo takes any peer for a rank, and aborts."""
        has_met = all((launch.directory / f"pid-{rank}").exists() for rank in range(2))
        return listening_ports(job.pid) if has_met else set()

    with launch.start(argv, env={**cell.env, REPORT_DIR: str(folder)}) as job, Strangers(ports) as they:
        outcome = job.wait(LIMIT_S)
    assert outcome.rc == 0, f"{they.met}\n{outcome}"
    assert not outcome.left, str(outcome)
    assert len({seen["parameters"] for seen in collect(folder, 2, outcome)}) == 1
    assert they.sent > len(MESSAGES) / 2
    effort.count("strangers at a job's ports", they.sent)


@pytest.mark.smoke("native")
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_garbage_at_the_rendezvous_port_does_not_disturb_rendezvous(
    launch: Launch, free_port: int, backend: str, effort: Effort
) -> None:
    """Rank 1 starts late: rank 0 waits for it at a port that the strangers have found."""
    with ExitStack() as stack:
        jobs: list[Job] = []
        they = stack.enter_context(Strangers(lambda: listening_ports(jobs[0].pid) if jobs else set()))
        for rank in (0, 1):
            jobs.append(stack.enter_context(launch.start([*RANK, backend], env=rank_env(rank, 2, free_port))))
            deadline = time.monotonic() + LIMIT_S
            while free_port not in they.met and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        outcomes = [job.wait(LIMIT_S) for job in jobs]
    for outcome in outcomes:
        assert outcome.rc == 0, str(outcome)
    assert free_port in they.met
    effort.count("strangers at a job's ports", they.sent)

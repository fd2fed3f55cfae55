"""Peers that do not belong to a job and talk to whatever listens: a person's browser, a scanner, somebody malicious."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil

CONNECT_S = 1.0
LOOK_S = 0.1
# How many connections stay open at each port and say nothing, or a byte now and then.
LORISES = 25
# torch/csrc/distributed/c10d/TCPStoreBackend.hpp: the queries of its store, of which the first is followed by this.
VALIDATE, MAGIC = 0, struct.pack("<I", 0x3C85F7CE)
HUGE = struct.pack("<Q", 1 << 60)
DRAWS = random.Random(17)


def _queries() -> Iterator[bytes]:
    """What a client of torch's store says, cut short, too long, or impossible."""
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


WORDS = list(_garbage())


def _say(port: int, word: bytes, *, abruptly: bool) -> None:
    """Say the word and leave, in good order or by a reset."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), CONNECT_S) as peer:
        peer.settimeout(CONNECT_S)
        peer.sendall(word)
        if abruptly:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(0.02)
            peer.recv(1 << 16)


class Strangers:
    """They talk to every port that the watched processes listen on, until the end."""

    def __init__(self, ports: Callable[[], set[int]]) -> None:
        self._ports = ports
        self._stop = threading.Event()
        self._lorises: list[socket.socket] = []
        self.met: set[int] = set()
        self.words = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            for port in self._ports() - self.met:
                self.met.add(port)
                self._sit_at(port)
                for word in DRAWS.sample(WORDS, len(WORDS)):
                    if self._stop.is_set():
                        return
                    _say(port, word, abruptly=DRAWS.random() < 0.3)
                    self.words += 1
            for loris in self._lorises:
                with contextlib.suppress(OSError):
                    loris.send(DRAWS.randbytes(1)) if DRAWS.random() < 0.1 else None

    def _sit_at(self, port: int) -> None:
        for _ in range(LORISES):
            with contextlib.suppress(OSError):
                loris = socket.create_connection(("127.0.0.1", port), CONNECT_S)
                loris.setblocking(False)
                self._lorises.append(loris)

    def leave(self) -> None:
        self._stop.set()
        self._thread.join()
        for loris in self._lorises:
            loris.close()


@contextmanager
def strangers(ports: Callable[[], set[int]]) -> Iterator[Strangers]:
    found = Strangers(ports)
    try:
        yield found
    finally:
        found.leave()


def listening(pid: int, names: Mapping[str, bool] | None = None) -> set[int]:
    """The TCP ports on which a process and what it started listen."""
    ports: set[int] = set()
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found = process.net_connections("tcp")
                ports.update(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN)
    return ports

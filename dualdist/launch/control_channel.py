"""The line from each rank to `dualdist run`: a rank tells of its end on it, and ends when it is cut.

After the greeting each byte to the rank is the number of a signal for its program.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

CONTROL_VARIABLE = "DUALDIST_RUN"
WELCOME = b"ok\n"
CONNECT_S = 3.0
# A host that is silent for 14 s has been lost: the kernel asks after 5 s, and 3 times more.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
SILENT_MS = 14_000
MAX_MESSAGE_BYTES = 1 << 20


class ControlChannelError(Exception):
    """Nobody answers at any of the addresses; `is_gone` where they answer that nobody listens."""

    def __init__(self, message: str, *, is_gone: bool) -> None:
        super().__init__(message)
        self.is_gone = is_gone


@dataclass(frozen=True)
class ControlAddress:
    """Where `dualdist run` listens, under which addresses it may be reached, and what proves a rank to be its own."""

    addresses: tuple[str, ...]
    port: int
    token: str

    @staticmethod
    def new(addresses: Sequence[str], port: int) -> ControlAddress:
        return ControlAddress(tuple(dict.fromkeys(addresses)), port, secrets.token_hex(16))

    def dumps(self) -> str:
        return f"{self.token}:{self.port}:{','.join(self.addresses)}"

    @staticmethod
    def loads(text: str) -> ControlAddress:
        """ValueError for what dumps() did not write."""
        token, port, addresses = text.split(":", 2)
        if not 0 < int(port) < 65536:
            raise ValueError(f"port {port}")
        return ControlAddress(tuple(addresses.split(",")), int(port), token)


@dataclass(frozen=True)
class RankHello:
    """What a rank says first. `round` counts how often the launcher has restarted the ranks.

    A keeper, which is no rank, only wants to know when the job is over.
    """

    token: str
    rank: int | None
    host: str
    round: int
    is_guard: bool = False


@dataclass(frozen=True)
class RankEnded:
    """How a rank ended: its exit code, or minus a signal's number; `text` is its traceback, or the end of its stderr.

    `age_s` is how long ago the traceback began. `was_terminated`: it had been asked to end, so that this says nothing.
    """

    code: int
    age_s: float
    was_terminated: bool
    text: str


@dataclass(frozen=True)
class RankFailing:
    """A rank prints this traceback. Whoever ends it at once, as MPI_Abort does, leaves it no time to say more."""

    traceback: str


Message = TypeVar("Message", RankHello, RankEnded, RankFailing)


def dumps(message: RankHello | RankEnded | RankFailing) -> bytes:
    """The message as a line."""
    return json.dumps(asdict(message)).encode() + b"\n"


def loads(kind: type[Message], line: bytes) -> Message | None:
    """None for what is no such message."""
    try:
        return kind(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice when the other host has gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for name, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)


def connect(address: ControlAddress, hello: RankHello) -> socket.socket:
    """The line, from a rank; LinkError where nobody answers."""
    errors, refused = [], True
    for name in address.addresses:
        try:
            connection = socket.create_connection((name, address.port), CONNECT_S)
        except OSError as error:
            errors.append(f"{name}: {error.strerror or error}")
            refused = refused and isinstance(error, ConnectionRefusedError)
            continue
        try:
            connection.sendall(dumps(hello))
            answer = connection.recv(len(WELCOME))
            if answer == WELCOME:
                connection.setblocking(False)
                keep_alive(connection)
                return connection
            errors.append(f"{name}: {'another program answers' if answer else 'the job is over'}")
        except OSError as error:
            errors.append(f"{name}: {error.strerror or error}")
        connection.close()
    raise ControlChannelError(f"port {address.port}, {'; '.join(errors)}", is_gone=refused)

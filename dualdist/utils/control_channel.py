"""The control channel: TCP connections to `dualdist run`. Every message but a signal is a line of JSON.

Each rank process (launch/rank.py) reports on its connection how its program ended. When `dualdist run` closes the
connection, the rank ends. After the handshake each byte to the rank is the number of a signal for its program.

In a job that keeps its ranks when one is lost, each program has a second connection: it reports when it is ready to
meet the others, and is assigned a rank.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from typing import TypeAlias, TypeVar

CONTROL_VARIABLE = "DUALDIST_RUN"
WELCOME = b"ok\n"
CONNECT_S = 3.0
# A host that is silent for 14 s is lost: the kernel probes it after 5 s, and 3 more times.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
SILENT_MS = 14_000
MAX_MESSAGE_BYTES = 1 << 20


class ControlChannelError(Exception):
    """No connection to `dualdist run`; `is_gone` if every address refused it."""

    def __init__(self, message: str, *, is_gone: bool) -> None:
        super().__init__(message)
        self.is_gone = is_gone


@dataclass(frozen=True)
class ControlAddress:
    """The addresses and port of `dualdist run`, and the token that authenticates its ranks."""

    addresses: tuple[str, ...]
    port: int
    token: str

    def dumps(self) -> str:
        return f"{self.token}:{self.port}:{','.join(self.addresses)}"

    @staticmethod
    def loads(text: str) -> ControlAddress:
        """Parse the result of dumps(); ValueError for anything else."""
        token, port, addresses = text.split(":", 2)
        if not 0 < int(port) < 65536:
            raise ValueError(f"port {port}")
        return ControlAddress(tuple(addresses.split(",")), int(port), token)


@dataclass(frozen=True)
class RankHello:
    """The first message of a rank.

    A guard (see ssh.py) is no rank, and connects only to notice the end of the job.
    """

    token: str
    rank: int | None
    host: str
    is_guard: bool = False


@dataclass(frozen=True)
class RankEnded:
    """The end of a rank: its exit code, or minus a signal's number, and its traceback or the end of its stderr.

    `age_s` is the age of the traceback. `was_terminated`: a signal asked the rank to end, so that its code is no cause.
    """

    code: int
    age_s: float
    was_terminated: bool
    text: str


@dataclass(frozen=True)
class RankFailing:
    """A traceback that a rank is printing; MPI_Abort may kill the rank before it can report its end."""

    traceback: str


@dataclass(frozen=True)
class ProgramHello:
    """The first message of a program, which runs at a place of the job: the place keeps its number, ranks change."""

    token: str
    place: int


@dataclass(frozen=True)
class ProgramReady:
    """The program waits for its rank in the next generation.

    `timeout_s` is the time limit of its operations; `timed_out` says that one of them ended by it. `has_state`: it has
    had the training's state, as rank 0 or from rank 0.
    """

    timeout_s: float
    timed_out: bool
    has_state: bool = False


@dataclass(frozen=True)
class Assignment:
    """The rank of a program in a generation: the ranks that meet, and train until one is lost or others join."""

    generation: int
    rank: int
    size: int


@dataclass(frozen=True)
class PublishedAddress:
    """The address of rank 0 in a generation: a message of rank 0, which `dualdist run` passes on to the others."""

    generation: int
    address: str


@dataclass(frozen=True)
class RanksChange:
    """The end of a generation: at once if a rank `is_lost`, else after a commit, since programs wait to join."""

    generation: int
    reason: str
    is_lost: bool


@dataclass(frozen=True)
class JobOver:
    """The program has to exit with this code."""

    code: int
    reason: str


Message: TypeAlias = (
    RankHello
    | RankEnded
    | RankFailing
    | ProgramHello
    | ProgramReady
    | Assignment
    | PublishedAddress
    | RanksChange
    | JobOver
)
MessageT = TypeVar("MessageT", bound=Message)


def dumps(message: Message) -> bytes:
    return json.dumps(asdict(message)).encode() + b"\n"


def loads(kind: type[MessageT], line: bytes) -> MessageT | None:
    """Return the message of a line; None if it is no such message."""
    try:
        return kind(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel detect that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)


def connect(address: ControlAddress, hello: RankHello | ProgramHello) -> socket.socket:
    """Connect a rank or its program to `dualdist run`; ControlChannelError if no address accepts it."""
    errors, refused = [], True
    for name in address.addresses:
        connection = None
        try:
            connection = socket.create_connection((name, address.port), CONNECT_S)
            connection.sendall(dumps(hello))
            answer = connection.recv(len(WELCOME))
            if answer == WELCOME:
                connection.setblocking(False)
                keep_alive(connection)
                return connection
            errors.append(f"{name}: {'another program answers' if answer else 'the job is over'}")
        except OSError as error:
            errors.append(f"{name}: {error.strerror or error}")
            refused = refused and (connection is not None or isinstance(error, ConnectionRefusedError))
        if connection is not None:
            connection.close()
    raise ControlChannelError(f"port {address.port}, {'; '.join(errors)}", is_gone=refused)

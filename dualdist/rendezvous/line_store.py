"""A key-value store without torch, for ranks that meet before their program starts; requests are lines of JSON.

Note [strangers]: any process that reaches the port, and any user of a host the names of Linux's abstract namespace, may
connect. Connections of other users to a Unix socket are dropped, and so is whoever sends what is no request. Whoever
connects and sends nothing keeps nobody waiting, and the oldest of many such connections are dropped.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from typing import Any

from dualdist.errors import RendezvousError
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import PROBE_S, format_endpoint
from dualdist.utils.unix_peer import is_own

POLL_S = 0.02
ANSWER_S = 5.0  # by which an answer may come later than the time limit that the request gives
MAX_SILENT = 64  # connections that have not sent a request
MAX_FIRST_BYTES, MAX_BYTES = 1 << 16, 1 << 26  # of a connection's first request, and of any


class LineStore:
    """A client of the store. `address` is that by which this rank reached it."""

    def __init__(
        self, connection: socket.socket, address: str, endpoint: str, server: LineServer | None = None
    ) -> None:
        self.address = address
        self.endpoint = endpoint
        self._connection = connection
        self._server = server
        self._unread = b""

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str, timeout_s: float) -> str:
        found = self._ask("get", key, timeout_s, timeout_s)
        if found is None:
            raise TimeoutError(key)
        return str(found)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def has(self, key: str) -> bool:
        return bool(self._ask("has", key, None))

    def close(self, deadline: Deadline) -> None:
        """Disconnect; where the store is served, wait until the other ranks have disconnected, too."""
        self._connection.close()
        if self._server is not None:
            self._server.close(deadline)

    def _ask(self, verb: str, key: str, value: object, wait_s: float = 0.0) -> Any:
        try:
            self._connection.settimeout(wait_s + ANSWER_S)
            self._connection.sendall(json.dumps([verb, key, value]).encode() + b"\n")
            while b"\n" not in self._unread:
                data = self._connection.recv(MAX_FIRST_BYTES)
                if not data or len(self._unread) > MAX_BYTES:
                    raise ConnectionError("it closed the connection")
                self._unread += data
            line, _, self._unread = self._unread.partition(b"\n")
            (answer,) = json.loads(line)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RendezvousError(f"rank 0 did not answer at {self.endpoint} ({error}): did it end?") from error
        return answer


def connect(address: str, port: int, listener: socket.socket | None, deadline: Deadline) -> LineStore:
    """Connect to the store at address:port, after serving it on the listening socket if one is given."""
    if listener is not None:
        return serve(listener, address, format_endpoint(address, port))
    timeout_s = max(0.1, min(PROBE_S, deadline.left_s()))
    try:
        connection = socket.create_connection((address, port), timeout_s)
    except OSError as error:
        raise RendezvousError(f"rank 0 at {format_endpoint(address, port)} could not be reached ({error})") from error
    return LineStore(connection, address, format_endpoint(address, port))


def serve(listener: socket.socket, address: str, endpoint: str) -> LineStore:
    """Serve a store on the listening socket in a thread, and return this rank's own client of it."""
    own, served = socket.socketpair()
    return LineStore(own, address, endpoint, LineServer(listener, served))


class LineServer:
    """Serves the store in a thread until close()."""

    def __init__(self, listener: socket.socket, own: socket.socket) -> None:
        listener.setblocking(False)
        own.setblocking(False)
        self._listener = listener
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._received: dict[socket.socket, bytes] = {own: b""}  # less than a line, by connection, the oldest first
        self._ranks = {own}  # and connections that have sent a request
        self._waiting: dict[socket.socket, tuple[str, Deadline]] = {}  # for a key
        self._until: Deadline | None = None  # set by close()
        self._thread = threading.Thread(target=self._run, name="dualdist-line-store", daemon=True)
        self._thread.start()

    def close(self, deadline: Deadline) -> None:
        """Serve until all ranks that have connected have left, or until the deadline; the port is free then."""
        self._until = deadline
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._until is None or (self._ranks and not self._until.passed()):
                for connection in self._readable():
                    if connection is self._listener:
                        self._accept()
                    else:
                        self._receive(connection)
                for connection, (key, deadline) in list(self._waiting.items()):
                    if key in self._values or deadline.passed():
                        del self._waiting[connection]
                        self._send(connection, self._values.get(key))
                for connection in [each for each in self._received if each not in self._ranks][:-MAX_SILENT]:
                    self._drop(connection)
        finally:
            for connection in (self._listener, *self._received):
                connection.close()

    def _readable(self) -> list[socket.socket]:
        poll = select.poll()
        for each in (self._listener, *self._received):
            poll.register(each, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * POLL_S)}
        return [each for each in (self._listener, *self._received) if each.fileno() in ready]

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:  # it is gone, or no file descriptor is left
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX or is_own(connection):  # Note [strangers]
            self._received[connection] = b""
        else:
            connection.close()

    def _receive(self, connection: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = connection.recv(MAX_FIRST_BYTES)
        self._received[connection] += data
        limit = MAX_BYTES if connection in self._ranks else MAX_FIRST_BYTES
        if not data or len(self._received[connection]) > limit:
            self._drop(connection)
            return
        *lines, self._received[connection] = self._received[connection].split(b"\n")
        for line in lines:
            try:
                verb, key, value = json.loads(line)
                self._answer(connection, verb, str(key), value)
            except (ValueError, TypeError, RecursionError):  # a probe, or a stranger
                self._drop(connection)
                return
            self._ranks.add(connection)

    def _answer(self, connection: socket.socket, verb: str, key: str, value: Any) -> None:
        """Answer a request; a rank that waits for a key is answered by _run()."""
        if verb == "get":
            self._waiting[connection] = key, Deadline(float(value))
        elif verb == "set":
            self._values[key] = str(value)
            self._send(connection, None)
        elif verb == "add":
            self._counts[key] = self._counts.get(key, 0) + int(value)
            self._send(connection, self._counts[key])
        elif verb == "has":
            self._send(connection, key in self._values)
        else:
            raise ValueError(verb)

    def _send(self, connection: socket.socket, answer: object) -> None:
        connection.settimeout(PROBE_S)
        with contextlib.suppress(OSError):  # its end is read later
            connection.sendall(json.dumps([answer]).encode() + b"\n")
        connection.setblocking(False)

    def _drop(self, connection: socket.socket) -> None:
        del self._received[connection]
        self._ranks.discard(connection)
        self._waiting.pop(connection, None)
        connection.close()

"""Program of `dualdist doctor --hosts` on each host, over ssh: reports facts, listens, connects to the others.

Requests arrive on stdin as lines of JSON; replies go to stdout. The program exits at end of input.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from dualdist.doctor.host import collect_host_facts, resolve
from dualdist.utils.network_interfaces import failure_reason

# The nonce proves that this program answered, on the intended host.
GREETING = "dualdist doctor {}\n"
CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
# The default port of torchrun and many scripts.
DEFAULT_PORT = 29500


def open_listeners(nonce: str) -> list[socket.socket]:
    """Return sockets that greet every client, on a port chosen by the system and on DEFAULT_PORT if it is free."""
    greeting = GREETING.format(nonce).encode()
    servers = []
    for port in (0, DEFAULT_PORT):
        try:
            server = socket.create_server(("", port))
        except OSError:
            continue
        threading.Thread(target=_greet_clients, args=(server, greeting), daemon=True).start()
        servers.append(server)
    return servers


def _greet_clients(server: socket.socket, greeting: bytes) -> None:
    while True:
        try:
            client, _ = server.accept()
            with client:
                client.sendall(greeting)
        except OSError:
            continue


def connect(address: str, port: int, nonce: str) -> str:
    """Connect to the host with this nonce; return the error, "" for success."""
    greeting = GREETING.format(nonce).encode()
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT_S) as client:
            received = client.recv(len(greeting), socket.MSG_WAITALL)
    except ConnectionRefusedError:
        return "connection refused, though dualdist listens there; is there a firewall between the hosts?"
    except OSError as error:
        return failure_reason(error)
    return "" if received == greeting else "another program answers; does another host have the same address?"


def handle(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to one request."""
    if request["request"] == "clock":
        return {"time": time.time()}
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        errors = list(pool.map(lambda target: connect(*target), request["targets"]))
        resolved = dict(zip(request["names"], pool.map(resolve, request["names"]), strict=True))
    return {"errors": errors, "resolved": resolved}


def main() -> int:
    """Report this host, then serve requests."""
    nonce = secrets.token_hex(8)
    ports = [server.getsockname()[1] for server in open_listeners(nonce)]
    _reply({"facts": asdict(collect_host_facts()), "ports": ports, "nonce": nonce})
    for line in sys.stdin:
        _reply(handle(json.loads(line)))
    return 0


def _reply(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

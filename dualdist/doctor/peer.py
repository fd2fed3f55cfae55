"""What `dualdist doctor --hosts` runs on every host, by ssh: tells of the host, listens for the others, and calls them.

Requests come on standard input, a line of JSON each, and are answered on standard output; its end ends this.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from dualdist.doctor import host
from dualdist.utils.network_interfaces import failure_reason

# By which others know that it was this program that answered, on the host that they meant.
GREETING = "dualdist doctor {}\n"
REACH_S = 5.0
AT_ONCE = 32
# Where torchrun's rank 0 listens, and scripts that do not think of a port.
USUAL_PORT = 29500


def listeners(nonce: str) -> list[socket.socket]:
    """Sockets that greet whoever calls: on a port that the system chose, and on the usual one where it is free."""
    greeting = GREETING.format(nonce).encode()
    found = []
    for port in (0, USUAL_PORT):
        try:
            server = socket.create_server(("", port))
        except OSError:
            continue
        threading.Thread(target=_greet, args=(server, greeting), daemon=True).start()
        found.append(server)
    return found


def _greet(server: socket.socket, greeting: bytes) -> None:
    while True:
        try:
            client, _ = server.accept()
            with client:
                client.sendall(greeting)
        except OSError:
            continue


def call(target: tuple[str, int], nonce: str) -> str:
    """Why the host of this nonce does not answer there; "" where it does."""
    greeting = GREETING.format(nonce).encode()
    try:
        with socket.create_connection(target, REACH_S) as client:
            said = client.recv(len(greeting), socket.MSG_WAITALL)
    except ConnectionRefusedError:
        return "the connection is refused, though dualdist listens there; does a firewall stand between the hosts?"
    except OSError as error:
        return failure_reason(error)
    return "" if said == greeting else "another program answers; is the address that of another host, too?"


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What this host says to one request."""
    if request["ask"] == "clock":
        return {"at": time.time()}
    targets: Sequence[tuple[str, int]] = [(address, port) for address, port, _ in request["targets"]]
    nonces = [nonce for *_, nonce in request["targets"]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        said = list(pool.map(call, targets, nonces))
        names = dict(zip(request["names"], pool.map(host.resolved, request["names"]), strict=True))
    return {"reached": [[*target, why] for target, why in zip(targets, said, strict=True)], "names": names}


def main() -> int:
    nonce = secrets.token_hex(8)
    ports = [server.getsockname()[1] for server in listeners(nonce)]
    _say({"host": asdict(host.look()), "ports": ports, "nonce": nonce})
    for line in sys.stdin:
        _say(answer(json.loads(line)))
    return 0


def _say(said: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

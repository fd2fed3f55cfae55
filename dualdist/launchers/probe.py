"""What a host says of itself to `dualdist run`, as JSON on stdout: run there by ssh before a job starts.

    python -m dualdist.launchers.probe [ADDRESS PORT]

With an address it also says why that cannot be reached from there; that nobody listens on the port is as it should be.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass

from dualdist.network import interfaces, reason
from dualdist.version import __version__

REACH_S = 5.0


@dataclass(frozen=True)
class Facts:
    """`interfaces` by name; `client` and `server` are the ends of the ssh connection, "" where there is none."""

    hostname: str
    cores: int
    interfaces: dict[str, str]
    port: int
    client: str
    server: str
    version: str
    unreachable: str = ""

    def addresses(self) -> tuple[str, ...]:
        """By which other hosts may reach this one."""
        return tuple(address for address in self.interfaces.values() if not address.startswith("127."))


def look(target: tuple[str, int] | None) -> Facts:
    """The facts of this host; `port` was free a moment ago."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    client, _, server, *_ = (os.environ.get("SSH_CONNECTION") or "  ").split(" ")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    unreachable = "" if target is None else _unreachable(target)
    name = socket.gethostname().split(".")[0]
    return Facts(name, cores, interfaces(), port, client, server, __version__, unreachable)


def _unreachable(target: tuple[str, int]) -> str:
    """Why the host of this address does not answer; "" where it does, be it by a refusal."""
    try:
        with socket.create_connection(target, REACH_S):
            return ""
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return reason(error)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(look((sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else None))) + "\n")

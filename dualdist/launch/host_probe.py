"""A host's cores, addresses and reach as JSON on stdout: `dualdist run` runs this by ssh before a job starts.

    python -m dualdist.launch.host_probe [PORT ADDRESS...]

It also tries to connect to each address, and reports why that fails; a refused connection is a success.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from dualdist.utils.machine import usable_cores
from dualdist.utils.network_interfaces import failure_reason, list_interfaces
from dualdist.version import __version__

CONNECT_S = 5.0
# Two hosts with the same address, such as a container bridge's, do not reach each other by it.
SAME_ADDRESS = "this host has the same address"


@dataclass(frozen=True)
class ProbedHost:
    """The facts of a host: `interfaces` has addresses by name, `unreachable` reasons by address.

    `port` was free a moment ago. `client` and `server` are the ends of the ssh connection, "" if there is none.
    """

    hostname: str
    cores: int
    interfaces: dict[str, str]
    port: int
    client: str
    server: str
    version: str
    unreachable: dict[str, str] = field(default_factory=dict)

    def networks(self) -> dict[str, str]:
        """Return the interfaces without loopback."""
        return {name: address for name, address in self.interfaces.items() if not address.startswith("127.")}

    def list_interfaces(self) -> str:
        return ", ".join(f"{name} ({address})" for name, address in self.interfaces.items())


def probe_host(port: int = 0, addresses: Sequence[str] = ()) -> ProbedHost:
    """Return the facts of this host, and which of the addresses it cannot reach."""
    with socket.create_server(("", 0)) as free:
        free_port = free.getsockname()[1]
    client, _, server, *_ = (os.environ.get("SSH_CONNECTION") or "  ").split(" ")
    name, own = socket.gethostname().split(".")[0], list_interfaces()
    with ThreadPoolExecutor() as pool:
        reasons = pool.map(lambda address: _connect_error(address, port, own), addresses)
        unreachable = {address: reason for address, reason in zip(addresses, reasons, strict=True) if reason}
    return ProbedHost(name, usable_cores(), own, free_port, client, server, __version__, unreachable)


def _connect_error(address: str, port: int, own: Mapping[str, str]) -> str:
    """Return why the address cannot be reached; "" if its host answers, even by refusing the connection."""
    if address in own.values():
        return SAME_ADDRESS
    try:
        with socket.create_connection((address, port), CONNECT_S):
            return ""
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return failure_reason(error)


if __name__ == "__main__":
    _port, *_addresses = sys.argv[1:] or ["0"]
    sys.stdout.write(json.dumps(asdict(probe_host(int(_port), _addresses))) + "\n")

"""What a host says of itself to `dualdist run`, as JSON on stdout: run there by ssh before a job starts.

    python -m dualdist.launch.host_probe [PORT ADDRESS...]

Of each address it also says why that cannot be reached from there; that nobody listens on the port is as it should be.
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

REACH_S = 5.0
# Why an address that both hosts have leads from neither to the other.
SAME_ADDRESS = "this host has the same address"


@dataclass(frozen=True)
class ProbedHost:
    """`interfaces` by name; `client` and `server` are the ends of the ssh connection, "" where there is none.

    `unreachable` says why, by address.
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
        """The interfaces by which other hosts may reach this one."""
        return {name: address for name, address in self.interfaces.items() if not address.startswith("127.")}


def probe_host(port: int = 0, addresses: Sequence[str] = ()) -> ProbedHost:
    """The facts of this host, and whether it reaches another one; the port that it names was free a moment ago."""
    with socket.create_server(("", 0)) as free:
        own_port = free.getsockname()[1]
    client, _, server, *_ = (os.environ.get("SSH_CONNECTION") or "  ").split(" ")
    name, own = socket.gethostname().split(".")[0], list_interfaces()
    with ThreadPoolExecutor() as pool:
        reasons = pool.map(lambda address: _unreachable(address, port, own), addresses)
        unreachable = {address: why for address, why in zip(addresses, reasons, strict=True) if why}
    return ProbedHost(name, usable_cores(), own, own_port, client, server, __version__, unreachable)


def _unreachable(address: str, port: int, own: Mapping[str, str]) -> str:
    """Why the host of this address does not answer; "" where it does, be it by a refusal."""
    if address in own.values():
        return SAME_ADDRESS
    try:
        with socket.create_connection((address, port), REACH_S):
            return ""
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return failure_reason(error)


if __name__ == "__main__":
    _port, *_addresses = sys.argv[1:] or ["0"]
    sys.stdout.write(json.dumps(asdict(probe_host(int(_port), _addresses))) + "\n")

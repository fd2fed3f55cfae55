"""Which addresses this host has, and whether another one answers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualdist.errors import RendezvousError
from dualdist.utils.deadline import Deadline

LOOPBACK = "127.0.0.1"
SLURM_NODE_NAME = "SLURMD_NODENAME"
SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
OWN_IPV6 = "/proc/net/if_inet6"  # each line begins with an address, and ends with its interface
PROBE_S = 5.0


def list_interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return found


def host_addresses() -> list[str]:
    """The addresses under which other hosts may reach this one, the likeliest first, without loopback."""
    addresses = [address for address in list_interfaces().values() if not address.startswith("127.")]
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if named in addresses:
            addresses.remove(named)
            addresses.insert(0, named)
    return addresses


def resolve_address(host: str) -> str:
    """An address of the host, IPv4 where it has such a one; RendezvousError where it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(f"{host} has no address: {failure_reason(error)}") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def interface_towards(address: str) -> str | None:
    """The name of the interface from which packets to `address` leave, None where no route exists."""
    try:
        found = resolve_address(address)
        with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((found, 9))  # UDP: chooses a route, sends nothing
            source = probe.getsockname()[0]
    except (OSError, RendezvousError):
        return None
    return find_interface(source)


def find_interface(address: str) -> str | None:
    """The name of this host's interface that has the address, None where none has."""
    if ":" not in address:
        return next((name for name, own in list_interfaces().items() if own == address), None)
    digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(OWN_IPV6).read_text().splitlines()]
        return next((name for own, *_, name in lines if own == digits), None)
    return None


def host_identity(environ: Mapping[str, str]) -> str:
    """A text that is the same for two ranks exactly if they run on the same host.

    Two containers or network namespaces of one machine are two hosts, and so are two Slurm nodes that share a machine.
    """
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    return "/".join((environ.get(SLURM_NODE_NAME, ""), socket.gethostname(), boot, namespace))


def wait_until_listening(address: str, port: int, deadline: Deadline, who: str) -> None:
    """Return once a connection to address:port succeeds; RendezvousError, which says why it did not, at the deadline.

    A name that does not resolve is tried again as well: on Kubernetes a name appears when its pod is ready.
    """
    pause_s = 0.01
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, min(PROBE_S, deadline.left_s()))):
                return
        except UnicodeError as error:  # before any name service is asked
            raise RendezvousError(f"{who} at {address[:80]!r}:{port}: this is no name of a host") from error
        except OSError as error:
            if deadline.passed():
                raise RendezvousError(
                    f"{who} at {address}:{port} could not be reached within {deadline.timeout_s:g} s: "
                    f"{failure_reason(error)}"
                ) from error
        deadline.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def failure_reason(error: OSError) -> str:
    """Why a connection failed, in words."""
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "the host answers, but nothing listens on this port"
    if isinstance(error, TimeoutError):
        return "no answer; is the address right, and does a firewall stand between the hosts?"
    return error.strerror or str(error)


def open_listener(port: int, loopback_only: bool) -> socket.socket:
    """A socket that listens on `port`, 0 for any free one."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((LOOPBACK if loopback_only else "", port))
        server.listen(socket.SOMAXCONN)
    except OSError as error:
        server.close()
        raise RendezvousError(
            f"rank 0 cannot listen on port {port} ({error.strerror}): another program or an earlier run holds it; "
            "choose another port (MASTER_PORT, torchrun --master-port), or wait until that run has ended"
        ) from error
    return server


@dataclass(frozen=True)
class StoreAddress:
    """What rank 0 tells the others: on which host and port it listens, and under which addresses it may be reached."""

    host: str
    addresses: tuple[str, ...]
    port: int

    @staticmethod
    def of(host: str, port: int, *, one_node: bool) -> StoreAddress:
        """To this host; the addresses are left out where nobody comes from another one."""
        return StoreAddress(host, () if one_node else tuple(host_addresses()), port)

    def dumps(self) -> str:
        return json.dumps([self.host, self.addresses, self.port])

    @staticmethod
    def loads(text: str) -> StoreAddress:
        try:
            host, addresses, port = json.loads(text)
            if not 0 < int(port) < 65536:
                raise ValueError("no port")
            return StoreAddress(str(host), tuple(map(str, addresses)), int(port))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise RendezvousError(f"rank 0's address reads {text[:80]!r}, which this dualdist did not write") from error

    def answering_address(self, host: str, deadline: Deadline) -> str:
        """The first address that answers from `host`; RendezvousError, which lists what was tried, where none does."""
        errors = []
        for address in (LOOPBACK,) if host == self.host else self.addresses:
            try:
                wait_until_listening(address, self.port, Deadline(min(PROBE_S, deadline.left_s())), "rank 0")
                return address
            except RendezvousError as error:
                errors.append(str(error))
        raise RendezvousError(
            "; ".join(errors) or f"rank 0 on {self.host} has no address that another host could reach"
        )

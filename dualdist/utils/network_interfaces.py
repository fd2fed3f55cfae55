"""Network interfaces and addresses of this host, and connections to others."""

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
# A line for each address of IPv6: its digits, three numbers, the flags of rtnetlink(7), and its interface.
IPV6_INTERFACES = "/proc/net/if_inet6"
GLOBAL_SCOPE, UNUSABLE_FLAGS = "00", 0x01 | 0x08 | 0x20 | 0x40  # temporary, failed, deprecated, tentative
PROBE_S = 5.0


def list_interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface, or its address of IPv6, by the interface's name."""
    return {**_list_ipv6(), **_list_ipv4()}


def _list_ipv4() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return found


def _list_ipv6() -> dict[str, str]:
    """Return a lasting address of IPv6 of each interface that has one which other hosts reach."""
    found: dict[str, str] = {}
    for digits, _, _, scope, flags, name in _ipv6_lines():
        if scope == GLOBAL_SCOPE and not int(flags, 16) & UNUSABLE_FLAGS:
            found.setdefault(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _ipv6_lines() -> list[list[str]]:
    with contextlib.suppress(OSError):  # a kernel without IPv6
        return [line.split() for line in Path(IPV6_INTERFACES).read_text().splitlines()]
    return []


def host_addresses() -> list[str]:
    """Return this host's addresses except loopback: of IPv4, that of its host name first, then of IPv6."""
    addresses = [address for address in _list_ipv4().values() if not is_loopback(address)]
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if named in addresses:
            addresses.remove(named)
            addresses.insert(0, named)
    return [*addresses, *_list_ipv6().values()]


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def format_endpoint(address: str, port: int) -> str:
    """Return address:port, with an address of IPv6 in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def without_brackets(address: str) -> str:
    """Return the address, without the brackets in which one of IPv6 may stand."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def resolve_address(host: str) -> str:
    """Return an address of the host, preferably IPv4; raise RendezvousError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(f"{host} has no address: {failure_reason(error)}") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def interface_towards(address: str) -> str | None:
    """Return the interface through which packets to `address` leave, or None without a route."""
    try:
        found = resolve_address(address)
        with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((found, 9))  # UDP: chooses a route, sends nothing
            source = probe.getsockname()[0]
    except (OSError, RendezvousError):
        return None
    return find_interface(source)


def find_interface(address: str) -> str | None:
    """Return this host's interface that has the address, or None."""
    if ":" not in address:
        return next((name for name, each in _list_ipv4().items() if each == address), None)
    digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    return next((name for each, *_, name in _ipv6_lines() if each == digits), None)


def host_identity(environ: Mapping[str, str]) -> str:
    """Return a string that is equal for two ranks exactly if they run on the same host.

    Two containers or network namespaces of one machine are two hosts, as are two Slurm nodes that share a machine.
    """
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return "/".join((environ.get(SLURM_NODE_NAME, ""), socket.gethostname(), boot_id(), namespace))


def boot_id() -> str:
    """Return a string that is equal for two ranks if they share a kernel, thus processors; "" if it is unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def wait_until_listening(address: str, port: int, deadline: Deadline, who: str) -> None:
    """Return once a connection to address:port succeeds; raise RendezvousError, with the reason, at the deadline.

    Name resolution is retried too: on Kubernetes a name appears when its pod is ready.
    """
    pause_s = 0.01
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, min(PROBE_S, deadline.left_s()))):
                return
        except UnicodeError as error:  # raised before name resolution
            raise RendezvousError(f"{who} at {address[:80]!r}:{port}: not a host name") from error
        except OSError as error:
            if deadline.passed():
                raise RendezvousError(
                    f"{who} at {format_endpoint(address, port)} could not be reached within {deadline.timeout_s:g} s: "
                    f"{failure_reason(error)}"
                ) from error
        deadline.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def failure_reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "the host answers, but nothing listens on this port"
    if isinstance(error, TimeoutError):
        return "no answer; is the address right, and is there a firewall between the hosts?"
    return error.strerror or str(error)


def open_listener(port: int, loopback_only: bool) -> socket.socket:
    """Return a socket that listens on `port`, 0 for any free one; on addresses of IPv6 too, where the host has them."""
    backlog = socket.SOMAXCONN
    try:
        if loopback_only or not socket.has_dualstack_ipv6():
            return socket.create_server((LOOPBACK if loopback_only else "", port), backlog=backlog)
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot listen on port {port} ({os.strerror(error.errno or 0)}): another program or an earlier run "
            "uses it; choose another port (MASTER_PORT, torchrun --master-port), or wait until that run has ended"
        ) from error


@dataclass(frozen=True)
class StoreAddress:
    """The host identity and port on which rank 0 listens, and the addresses at which it may be reached."""

    host: str
    addresses: tuple[str, ...]
    port: int

    @staticmethod
    def of(host: str, port: int, *, one_node: bool) -> StoreAddress:
        """Return the address of this host; with `one_node`, only loopback will be used."""
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
            raise RendezvousError(f"rank 0's address reads {text[:80]!r}, not as written by dualdist") from error

    def reachable_address(self, host: str, deadline: Deadline) -> str:
        """Return the first address that answers from `host`; raise RendezvousError with all attempts if none does."""
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

"""Probe the hosts of a job in parallel: facts, clocks, and connections to each other.

Each host runs this module over ssh. It reports its facts, listens, and serves requests until the end of its input;
requests and replies are lines of JSON.
"""

import json
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from dualdist.doctor.checks.hosts import HostReport
from dualdist.doctor.facts import HostFacts, collect_host_facts, resolve
from dualdist.errors import LaunchError, RendezvousError
from dualdist.launch import ssh
from dualdist.launch.hosts import SAME_ADDRESS, is_local_host
from dualdist.launch.job import Host, Site
from dualdist.launch.ssh import HostPeer, start_peer
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import failure_reason, open_listener
from dualdist.version import __version__

PROGRAM = ("-m", "dualdist.doctor.hosts")
STARTUP_TIMEOUT_S = 30.0
CLOCK_TIMEOUT_S = 10.0
CLOCK_SAMPLES = 5
CONNECT_TIMEOUT_S = 5.0
# A host connects to many others at once, and some connections wait.
ALL_CONNECTIONS_TIMEOUT_S = 10 * CONNECT_TIMEOUT_S
MAX_CONNECTIONS = 32
# The default port of torchrun and many scripts.
DEFAULT_PORT = 29500

# The address and port at which another host can connect to this program.
Target = tuple[str, int]


def probe_hosts(hosts: Sequence[Host], site: Site, env: Mapping[str, str]) -> list[HostReport]:
    """Return a report of each host and its connections to the others; all ssh processes end with this call."""
    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(hosts))) as pool:
        peers = [stack.enter_context(start_peer(host.name, _argv(host.name, site, env), site)) for host in hosts]
        probed = list(pool.map(_probe_host, peers, hosts))
        targets = {report.name: each for report, each in probed if report.facts is not None}
        return list(pool.map(lambda peer, own: _connect_to_others(peer, own[0], targets), peers, probed))


def _argv(name: str, site: Site, env: Mapping[str, str]) -> list[str]:
    return [site.python, *PROGRAM] if is_local_host(name) else ssh.remote_python_argv(name, site, env, PROGRAM)


def _probe_host(peer: HostPeer, host: Host) -> tuple[HostReport, list[Target]]:
    try:
        facts, targets = parse_greeting(host.name, peer.exchange("report its facts", Deadline(STARTUP_TIMEOUT_S)))
        skew_s, error_s = min((_measure_skew(peer) for _ in range(CLOCK_SAMPLES)), key=lambda sample: sample[1])
        return HostReport(host.name, host.slots, "", facts, skew_s, error_s), targets
    except LaunchError as error:
        return HostReport(host.name, host.slots, str(error)), []


def parse_greeting(name: str, message: Mapping[str, Any]) -> tuple[HostFacts, list[Target]]:
    """Parse a host's first message; raise LaunchError if its dualdist has another format."""
    try:
        limits = {field: tuple(message["facts"][field]) for field in ("open_files", "locked_memory", "infiniband")}
        facts = HostFacts(**{**message["facts"], **limits})
        addresses = facts.external_interfaces().values()
        return facts, [(address, port) for address in addresses for port in message["ports"]]
    except (KeyError, TypeError) as error:
        version = message.get("facts", {}).get("versions", {}).get("dualdist", "of an unknown version")
        raise LaunchError(
            f"host {name!r} has dualdist {version}, but this host has {__version__}: install the same version"
        ) from error


def _measure_skew(peer: HostPeer) -> tuple[float, float]:
    """Return how far the host's clock is ahead of ours, and the error bound, by Cristian's algorithm."""
    sent = time.time()
    remote = float(peer.exchange("report its time", Deadline(CLOCK_TIMEOUT_S), {"request": "clock"})["time"])
    received = time.time()
    return remote - (sent + received) / 2, (received - sent) / 2


def _connect_to_others(peer: HostPeer, own: HostReport, targets: Mapping[str, Sequence[Target]]) -> HostReport:
    """Return the host's report with the results of its connections to the others."""
    others = {name: each for name, each in targets.items() if name != own.name}
    if own.facts is None or not others:
        return own
    flat = [target for each in others.values() for target in each]
    request = {"request": "connect", "targets": flat, "names": [strip_user(name) for name in others]}
    try:
        reply = peer.exchange("report its connections", Deadline(ALL_CONNECTIONS_TIMEOUT_S), request)
    except LaunchError as error:
        return replace(own, facts=None, problem=str(error))
    errors, addresses = iter(reply["errors"]), own.facts.external_interfaces().values()
    connections = {
        name: drop_own_addresses({target: next(errors) for target in each}, addresses) for name, each in others.items()
    }
    return replace(own, connections=connections, resolved=reply["resolved"])


def strip_user(name: str) -> str:
    """Return the host name without ssh's `user@`."""
    return name.rpartition("@")[2]


def drop_own_addresses(
    results: Mapping[tuple[str, int], str], addresses: Collection[str]
) -> dict[tuple[str, int], str]:
    """Drop connections to addresses that the connecting host has itself, such as docker0's.

    There it connects to itself, which says nothing about the other host. Where there are no others, all succeed only if
    both names are one host.
    """
    others = {target: error for target, error in results.items() if target[0] not in addresses}
    is_same_host = not any(results.values())
    return others or (dict(results) if is_same_host else dict.fromkeys(results, SAME_ADDRESS))


def open_listeners() -> list[socket.socket]:
    """Return listening sockets, on a port chosen by the system and on DEFAULT_PORT if it is free."""
    servers = []
    for port in (0, DEFAULT_PORT):
        try:
            servers.append(open_listener(port, loopback_only=False))  # the system accepts connections
        except RendezvousError:
            continue
    return servers


def connect(address: str, port: int) -> str:
    """Connect to another host's program; return the error, "" for success."""
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT_S):
            return ""
    except ConnectionRefusedError:
        return "connection refused, though dualdist listens there; is there a firewall between the hosts?"
    except OSError as error:
        return failure_reason(error)


def handle(request: Mapping[str, Any]) -> dict[str, Any]:
    if request["request"] == "clock":
        return {"time": time.time()}
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        errors = list(pool.map(lambda target: connect(*target), request["targets"]))
        resolved = dict(zip(request["names"], pool.map(resolve, request["names"]), strict=True))
    return {"errors": errors, "resolved": resolved}


def main() -> int:
    servers = open_listeners()
    _reply({"facts": asdict(collect_host_facts()), "ports": [server.getsockname()[1] for server in servers]})
    for line in sys.stdin:
        _reply(handle(json.loads(line)))
    return 0


def _reply(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

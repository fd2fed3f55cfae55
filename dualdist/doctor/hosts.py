"""Probe the hosts of a job in parallel: each runs peer.py over ssh and replies on its standard output."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualdist.doctor.checks.hosts import HostReport
from dualdist.doctor.host import HostFacts
from dualdist.doctor.peer import CONNECT_TIMEOUT_S
from dualdist.errors import LaunchError
from dualdist.launch import ssh
from dualdist.launch.host_probe import SAME_ADDRESS
from dualdist.launch.hosts import is_local_host
from dualdist.launch.job import Host, Site
from dualdist.version import __version__

PEER = ("-m", "dualdist.doctor.peer")
STARTUP_TIMEOUT_S = 30.0
CLOCK_TIMEOUT_S = 10.0
CLOCK_SAMPLES = 5
# A host connects to many others at once, and some connections wait.
ALL_CONNECTIONS_TIMEOUT_S = 10 * CONNECT_TIMEOUT_S


# The address, port and nonce at which another host can connect to peer.py.
Target = tuple[str, int, str]


class HostPeer:
    """A host's running peer.py."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], stderr: Path, site: Site) -> None:
        self.name = name
        self._process = process
        self._stderr = stderr
        self._site = site

    def request(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply; raise LaunchError if there is none."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # receive() reports why the process ended
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message; raise LaunchError if there is none."""
        assert self._process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:  # start-up files of the remote shell may print other lines first
            line = next((line for line in self._process.stdout if line.startswith(b"{")), b"")
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            try:
                return dict(json.loads(line))
            except ValueError as error:
                text = line[-200:].decode(errors="replace")
                raise LaunchError(f"host {self.name!r} replied {text!r}, which this dualdist cannot parse") from error
        if expired.is_set():
            raise LaunchError(f"host {self.name!r} did not reply within {timeout_s:g} s: is it up?")
        stderr = self._stderr.read_text(errors="replace")
        raise LaunchError(ssh.describe_ssh_failure(self.name, self._process.wait(), stderr, self._site))


def probe_hosts(hosts: Sequence[Host], site: Site, env: Mapping[str, str]) -> list[HostReport]:
    """Return a report of each host and its connections to the others; all ssh processes end with this call."""
    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(hosts))) as pool:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dualdist-doctor-")))
        peers = [
            stack.enter_context(_start_peer(host.name, site, env, folder / f"stderr-{number}"))
            for number, host in enumerate(hosts)
        ]
        probed = list(pool.map(_probe_host, peers, hosts))
        targets = {report.name: each for report, each in probed if report.facts is not None}
        return list(pool.map(lambda peer, own: _connect_to_others(peer, own[0], targets), peers, probed))


@contextmanager
def _start_peer(name: str, site: Site, env: Mapping[str, str], stderr: Path) -> Iterator[HostPeer]:
    argv = [site.python, *PEER] if is_local_host(name) else ssh.remote_python_argv(name, site, env, PEER)
    with stderr.open("wb") as file:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
        except OSError as error:
            raise LaunchError(f"cannot start {argv[0]} ({error}), which is needed to probe host {name!r}") from error
    with contextlib.suppress(BrokenPipeError), process:
        try:
            yield HostPeer(name, process, stderr, site)
        finally:
            process.kill()


def _probe_host(peer: HostPeer, host: Host) -> tuple[HostReport, list[Target]]:
    try:
        facts, targets = parse_greeting(host.name, peer.receive(STARTUP_TIMEOUT_S))
        skew_s, error_s = min((_measure_skew(peer) for _ in range(CLOCK_SAMPLES)), key=lambda sample: sample[1])
        return HostReport(host.name, host.slots, "", facts, skew_s, error_s), targets
    except LaunchError as error:
        return HostReport(host.name, host.slots, str(error)), []


def parse_greeting(name: str, message: Mapping[str, Any]) -> tuple[HostFacts, list[Target]]:
    """Parse a host's first message; raise LaunchError if its dualdist has another format."""
    try:
        limits = {field: tuple(message["facts"][field]) for field in ("open_files", "locked_memory", "infiniband")}
        facts, nonce = HostFacts(**{**message["facts"], **limits}), message["nonce"]
        addresses = facts.external_interfaces().values()
        return facts, [(address, port, nonce) for address in addresses for port in message["ports"]]
    except (KeyError, TypeError) as error:
        version = message.get("facts", {}).get("versions", {}).get("dualdist", "of an unknown version")
        raise LaunchError(
            f"host {name!r} has dualdist {version}, but this host has {__version__}: install the same version"
        ) from error


def _measure_skew(peer: HostPeer) -> tuple[float, float]:
    """Return how far the host's clock is ahead of ours, and the error bound, by Cristian's algorithm."""
    sent = time.time()
    remote = float(peer.request({"request": "clock"}, CLOCK_TIMEOUT_S)["time"])
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
        reply = peer.request(request, ALL_CONNECTIONS_TIMEOUT_S)
    except LaunchError as error:
        return replace(own, facts=None, problem=str(error))
    errors, addresses = iter(reply["errors"]), own.facts.external_interfaces().values()
    connections = {
        name: drop_own_addresses({(address, port): next(errors) for address, port, _ in each}, addresses)
        for name, each in others.items()
    }
    return replace(own, connections=connections, resolved=reply["resolved"])


def strip_user(name: str) -> str:
    """Return the host name without ssh's `user@`."""
    return name.rpartition("@")[2]


def drop_own_addresses(
    results: Mapping[tuple[str, int], str], addresses: Collection[str]
) -> dict[tuple[str, int], str]:
    """Drop failed connections to addresses that the connecting host has itself, such as docker0's.

    There it connects to itself, which says nothing about the other host. A success means that both names are one host.
    """
    kept = {target: error for target, error in results.items() if not error or target[0] not in addresses}
    return kept or dict.fromkeys(results, SAME_ADDRESS)

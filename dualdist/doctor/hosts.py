"""Asks the hosts of a job, all at once: each runs peer.py, reached by ssh, and answers on its standard output."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dualdist.doctor.checks.hosts import HostReport
from dualdist.doctor.facts import HostFacts
from dualdist.doctor.peer import REACH_S
from dualdist.errors import LaunchError
from dualdist.launch import ssh
from dualdist.launch.host_probe import SAME_ADDRESS
from dualdist.launch.hosts import is_local_host
from dualdist.launch.job import Host as NamedHost
from dualdist.launch.job import Site
from dualdist.version import __version__

PEER = ("-m", "dualdist.doctor.peer")
FIRST_S = 30.0
CLOCK_S = 10.0
CLOCKS = 5
# A host that calls many others at once makes some of them wait.
CALLS_S = 10 * REACH_S


@dataclass(frozen=True)
class ListeningPorts:
    """On which ports a host listens, and by which word it greets."""

    ports: tuple[int, ...] = ()
    nonce: str = ""


class HostPeer:
    """A host that answers: lines of JSON to its peer.py, and from it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], errors: Path, site: Site) -> None:
        self.name = name
        self._process = process
        self._errors = errors
        self._site = site
        self._unread = b""

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Its answer; LaunchError where none comes."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # hear() finds out why
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self.hear(timeout_s)

    def hear(self, timeout_s: float) -> dict[str, Any]:
        line = self._line(time.monotonic() + timeout_s, timeout_s)
        try:
            said = json.loads(line)
        except ValueError as error:
            text = line[-200:].decode(errors="replace")
            raise LaunchError(f"host {self.name!r} answers by {text!r}, which this dualdist did not write") from error
        if not isinstance(said, dict):
            raise LaunchError(f"host {self.name!r} answers by {said!r}, which this dualdist did not write")
        return said

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LaunchError(f"host {self.name!r} did not answer within {timeout_s:g} s: is it up?")
            piece = os.read(output, 1 << 16)
            if not piece:
                code = self._process.wait()
                said = self._errors.read_text(errors="replace")
                raise LaunchError(ssh.describe_ssh_failure(self.name, code, said, self._site))
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        # A shell's own start-up file may have printed something before.
        return line if line.startswith(b"{") else self._line(deadline, timeout_s)


def ask(hosts: Sequence[NamedHost], site: Site, env: Mapping[str, str]) -> list[HostReport]:
    """What the hosts say of themselves and of each other; whatever ends this, no ssh stays behind."""
    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(hosts))) as pool:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dualdist-doctor-")))
        peers = [
            stack.enter_context(_started(host.name, site, env, folder / f"errors-{number}"))
            for number, host in enumerate(hosts)
        ]
        first = list(pool.map(_first, peers, hosts))
        listening = {each.name: told for each, told in first}
        reported = [each for each, _ in first]
        return list(pool.map(lambda peer, own: _called(peer, own, reported, listening), peers, reported))


@contextmanager
def _started(name: str, site: Site, env: Mapping[str, str], errors: Path) -> Iterator[HostPeer]:
    argv = [site.python, *PEER] if is_local_host(name) else ssh.remote_python_argv(name, site, env, PEER)
    with errors.open("wb") as told:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told)
        except OSError as error:
            raise LaunchError(f"{argv[0]} cannot be started ({error}): it is needed to ask host {name!r}") from error
    with contextlib.suppress(BrokenPipeError), process:
        try:
            yield HostPeer(name, process, errors, site)
        finally:
            process.kill()


def _first(peer: HostPeer, named: NamedHost) -> tuple[HostReport, ListeningPorts]:
    """What a host says of itself, with its clock, and where it listens."""
    try:
        said = peer.hear(FIRST_S)
        host, listening = known(named.name, said)
        skew_s, error_s = min((_clock(peer) for _ in range(CLOCKS)), key=lambda pair: pair[1])
        return HostReport(named.name, named.slots, "", host, skew_s, error_s), listening
    except LaunchError as error:
        return HostReport(named.name, named.slots, str(error)), ListeningPorts()


def known(name: str, said: Mapping[str, Any]) -> tuple[HostFacts, ListeningPorts]:
    """What a host says first; LaunchError where another dualdist says it in other words."""
    try:
        return host_of(said["host"]), ListeningPorts(tuple(said["ports"]), said["nonce"])
    except (KeyError, TypeError) as error:
        version = said.get("host", {}).get("versions", {}).get("dualdist", "of an unknown version")
        raise LaunchError(
            f"host {name!r} has dualdist {version}, and this one {__version__}: install the same"
        ) from error


def _clock(peer: HostPeer) -> tuple[float, float]:
    """How far the host's clock is ahead of ours, and by how much that may be wrong: Cristian's algorithm."""
    began = time.time()
    at = float(peer.ask({"ask": "clock"}, CLOCK_S)["at"])
    ended = time.time()
    return at - (began + ended) / 2, (ended - began) / 2


def _called(
    peer: HostPeer, own: HostReport, all_of_them: Sequence[HostReport], listening: Mapping[str, ListeningPorts]
) -> HostReport:
    """The host, with how it fared when it called the others."""
    others = {each.name: each.host for each in all_of_them if each.host is not None and each.name != own.name}
    if own.host is None or not others:
        return own
    targets = {
        name: [(address, port) for address in other.networks().values() for port in listening[name].ports]
        for name, other in others.items()
    }
    calls = [(*at, listening[name].nonce) for name, each in targets.items() for at in each]
    request = {"ask": "reach", "targets": calls, "names": [address_of(name) for name in others]}
    try:
        said = peer.ask(request, CALLS_S)
    except LaunchError as error:
        return replace(own, host=None, problem=str(error))
    why = iter([reason for *_, reason in said["reached"]])
    shared = own.host.networks().values()
    reached = {name: told_by({target: next(why) for target in each}, shared) for name, each in targets.items()}
    return replace(own, reached=reached, names=said["names"])


def address_of(name: str) -> str:
    """The host's own name, as other hosts know it: without the user for ssh."""
    return name.rpartition("@")[2]


def told_by(calls: Mapping[tuple[str, int], str], own: Collection[str]) -> dict[tuple[str, int], str]:
    """What these calls tell of the other host, to a caller that has the addresses `own`.

    At an address that it has itself, as every host has that of docker0, it calls itself, and nobody's answer says
    anything; but where the right host answers, both are one host by two names.
    """
    told = {target: why for target, why in calls.items() if not why or target[0] not in own}
    return told or dict.fromkeys(calls, SAME_ADDRESS)


def host_of(said: Mapping[str, Any]) -> HostFacts:
    """Return the HostFacts that JSON holds."""
    pairs = {name: tuple(said[name]) for name in ("files", "locked", "infiniband")}
    return HostFacts(**{**said, **pairs})

"""The hosts of a job, from `a:2,b:2` or from a host file of Open MPI's, MPICH's, Horovod's or a scheduler's kind."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dualdist.errors import LaunchError, UsageError
from dualdist.launch import host_probe, ssh
from dualdist.launch.host_probe import ProbedHost
from dualdist.launch.job import Host, RendezvousAddress, Site
from dualdist.launch.processes import signals_deferred
from dualdist.version import __version__

# "name", "name:2" and "name slots=2", the last with other settings of Open MPI's around.
# A name goes to ssh and to launchers that call a shell: it has nothing that means something to one.
WORD = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.@-]*)(?::(?P<slots>[0-9]{1,9}))?")
LINE = re.compile(WORD.pattern + r"(?:\s+(?P<rest>.*))?")
SLOTS = re.compile(r"(?:^|\s)slots\s*=\s*(?P<slots>[0-9]{1,9})(?:\s|$)")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `a:2,b:2`; a host without a number has one slot."""
    found = []
    for word in text.split(","):
        match = WORD.fullmatch(word.strip())
        if match is None:
            raise UsageError(f"host {word.strip()!r}: expected a name and its slots, as a:2")
        found.append(_host(match["name"], match["slots"]))
    return merge_hosts(found)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file: "a slots=2" or "a:2" on a line, or "a" as often as it has slots; # begins a comment."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"host file {path}: cannot read it: {why}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = LINE.fullmatch(words)
        slots = SLOTS.search(match["rest"] or "") if match else None
        if match is None or (match["rest"] and slots is None and "=" not in match["rest"]):
            raise UsageError(f"{path}:{number}: expected a host and its slots, as in `a slots=2`, not {words!r}")
        found.append(_host(match["name"], slots["slots"] if slots else match["slots"], f"{path}:{number}: "))
    if not found:
        raise UsageError(f"host file {path}: it names no host; expected lines such as `a slots=2`")
    return merge_hosts(found)


def merge_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Every host once, in the order in which they come first, with all its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _host(name: str, slots: str | None, where: str = "") -> Host:
    if slots is not None and int(slots) < 1:
        raise UsageError(f"{where}host {name!r} has {slots} slots: expected 1 or more")
    return Host(name, int(slots or 1))


PROBE_S = 30.0
MAX_CONCURRENT = 32

# Runs the probe on hosts that are not this one, with its last arguments; LaunchError where one cannot take part.
Ask = Callable[[Sequence[str], Sequence[str]], list[ProbedHost]]


@dataclass(frozen=True)
class ReachedHosts:
    """The hosts as they were found: where ranks meet, by which addresses hosts reach this one, and their cores.

    `networks` are the interfaces by which all reach the first, where some host has others, too; else none are named.
    """

    hosts: tuple[Host, ...]
    rendezvous: RendezvousAddress
    back: tuple[str, ...]
    cores: tuple[int, ...]
    networks: tuple[str, ...]


def is_local_host(name: str) -> bool:
    """Whether the name is one of this host: an address to which one can bind is its own."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probed:
                probed.bind(address)
                return True
        except OSError:
            continue
    return False


def check_hosts(hosts: Sequence[Host], interface: str | None, site: Site, env: Mapping[str, str]) -> ReachedHosts:
    """What the hosts say. LaunchError names the first that cannot take part, and why."""
    known = [replace(host, is_local=is_local_host(host.name)) for host in hosts]
    return evaluate_hosts(
        known, interface, host_probe.probe_host(), lambda names, target: _asked(names, target, site, env)
    )


def evaluate_hosts(hosts: Sequence[Host], interface: str | None, here: ProbedHost, ask: Ask) -> ReachedHosts:
    """The first host is asked first, as the others have to reach it."""
    first = here if hosts[0].is_local else ask([hosts[0].name], ())[0]
    facts = {hosts[0].name: first}
    address = first.interfaces.get(interface, "") if interface is not None else first.server
    tried = first.networks().values() if interface is None else [address] * bool(address)
    target = (str(first.port), *tried)
    others = [host.name for host in hosts[1:] if not host.is_local]
    facts.update(zip(others, ask(others, target), strict=True))
    facts.update({host.name: here for host in hosts if host.is_local})
    _check(facts, interface, hosts[0].name, address)
    if not address:  # the first host is this one: as the others see it
        address = next((found.client for found in facts.values() if found.client), "127.0.0.1")
    seen = [found.client for found in facts.values() if found.client]
    back = tuple(dict.fromkeys([*seen, *here.networks().values()]))
    cores = tuple(facts[host.name].cores for host in hosts)
    return ReachedHosts(
        tuple(hosts), RendezvousAddress(address, first.port), back, cores, _networks(first, list(facts.values()))
    )


def _networks(first: ProbedHost, all_of_them: Sequence[ProbedHost]) -> tuple[str, ...]:
    known = {name for found in all_of_them for name in found.networks()}
    shared = tuple(
        name
        for name, address in first.networks().items()
        if all(name in found.interfaces and address not in found.unreachable for found in all_of_them)
    )
    return () if known == set(shared) else shared


def check_interface(host: str, facts: ProbedHost, interface: str | None) -> None:
    """LaunchError where the host lacks the interface that was named."""
    if interface is not None and interface not in facts.interfaces:
        raise LaunchError(
            f"host {host!r} has no network interface {interface!r} with an address; it has {_listed(facts)}"
        )


def _listed(facts: ProbedHost) -> str:
    return ", ".join(f"{name} ({address})" for name, address in facts.interfaces.items())


def _check(facts: Mapping[str, ProbedHost], interface: str | None, first: str, address: str) -> None:
    for name, found in facts.items():
        check_interface(name, found, interface)
        if found.version != __version__:
            raise LaunchError(
                f"host {name!r} has dualdist {found.version}, and this one {__version__}: install the same"
            )
    for name, found in facts.items():
        if why := found.unreachable.get(address):
            named = f"interface {interface}" if interface is not None else "the one by which ssh reached it"
            raise LaunchError(
                f"host {name!r} cannot reach host {first!r} at {address} ({named}): {why}; "
                f"{first} has {_listed(facts[first])}: name the one that they share by --network-interface"
            )


def _asked(hosts: Sequence[str], target: Sequence[str], site: Site, env: Mapping[str, str]) -> list[ProbedHost]:
    """Some at a time. Whatever ends this, Ctrl-C too, leaves no ssh behind."""
    found: list[ProbedHost] = []
    for start in range(0, len(hosts), MAX_CONCURRENT):
        some = hosts[start : start + MAX_CONCURRENT]
        deadline = time.monotonic() + PROBE_S
        with ExitStack() as stack:
            asking = [stack.enter_context(_ssh(host, ssh.probe_argv(host, site, env, target))) for host in some]
            found += [_told(host, each, site, deadline) for host, each in zip(some, asking, strict=True)]
    return found


@contextmanager
def _ssh(host: str, argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        try:
            with signals_deferred():
                process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
                stack.enter_context(process)
                stack.callback(process.kill)
        except OSError as error:
            raise LaunchError(f"ssh cannot be started ({error}): it is needed to reach host {host!r}") from error
        yield process


def _told(host: str, asking: subprocess.Popen[str], site: Site, deadline: float) -> ProbedHost:
    try:
        said, error_said = asking.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"host {host!r} did not say within {PROBE_S:g} s what it has: is it up?") from error
    if asking.returncode != 0:
        raise LaunchError(ssh.describe_ssh_failure(host, asking.returncode, error_said, site))
    try:
        return ProbedHost(**json.loads(said.strip().splitlines()[-1]))
    except (ValueError, TypeError, IndexError) as error:
        raise LaunchError(f"host {host!r} answers by {said[-200:]!r}, which this dualdist did not write") from error

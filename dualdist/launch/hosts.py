"""The hosts of a job: parsed from `a:2,b:2` or a host file, and probed by ssh before the job starts.

    python -m dualdist.launch.hosts [PORT ADDRESS...]

prints a host's cores and addresses, and which of the addresses it cannot reach, as JSON: `dualdist run` runs it by ssh.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dualdist.environments import slurm
from dualdist.errors import LaunchError, UsageError
from dualdist.launch import ssh
from dualdist.launch.job import Host, RendezvousAddress, Site
from dualdist.launch.ssh import start_peer
from dualdist.utils.deadline import Deadline
from dualdist.utils.machine import usable_cores
from dualdist.utils.network_interfaces import failure_reason, is_loopback, list_interfaces
from dualdist.utils.regular_file import open_regular
from dualdist.version import __version__

MAX_CHARACTERS = 1 << 20  # of a job file or a host file
# "name", "name:2" and "name slots=2", the last with other settings of Open MPI's around.
# Names go to ssh and to launchers that call a shell: no character has a meaning to one.
# An address of IPv6 stands in brackets.
WORD = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.@-]*|\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]+\])(?::(?P<slots>[0-9]{1,9}))?")
LINE = re.compile(WORD.pattern + r"(?:\s+(?P<rest>.*))?")
SLOTS = re.compile(r"(?:^|\s)slots\s*=\s*(?P<slots>[0-9]{1,9})(?:\s|$)")
PROBE_S = 30.0
MAX_CONCURRENT = 32
CONNECT_S = 5.0
# Two hosts with the same address, such as a container bridge's, do not reach each other by it.
SAME_ADDRESS = "this host has the same address"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of `a:2,b:2`; a host without a number has one slot."""
    found = []
    for word in text.split(","):
        match = WORD.fullmatch(word.strip())
        if match is None:
            raise UsageError(f"host {word.strip()!r}: expected a name and its slots, as a:2")
        found.append(_host(match["name"], match["slots"]))
    return merge_hosts(found)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file of Open MPI's, MPICH's, Horovod's or a scheduler's format.

    A line is "a slots=2" or "a:2", or "a" as often as it has slots; # begins a comment.
    """
    if not (found := parse_host_lines(read_text(path, "host file"), str(path))):
        raise UsageError(f"host file {path}: it names no host; expected lines such as `a slots=2`")
    return found


def parse_host_lines(text: str, source: str) -> tuple[Host, ...]:
    """Return the hosts that the lines of a host file name; UsageError names the source and the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = LINE.fullmatch(words)
        slots = SLOTS.search(match["rest"] or "") if match else None
        if match is None or (match["rest"] and slots is None and "=" not in match["rest"]):
            raise UsageError(f"{source}:{number}: expected a host and its slots, as in `a slots=2`, not {words!r}")
        found.append(_host(match["name"], slots["slots"] if slots else match["slots"], f"{source}:{number}: "))
    return merge_hosts(found)


def read_text(path: Path, what: str) -> str:
    """Return the text of a file that the user named; `what` is its kind in an error."""
    try:
        with open(path, encoding="utf-8", opener=open_regular) as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise OSError(None, f"it is longer than {MAX_CHARACTERS} characters")
        return text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path}: cannot read this {what}: {reason}") from error


def merge_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return every host once, in order of first appearance, with all its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _host(name: str, slots: str | None, where: str = "") -> Host:
    if slots is not None and int(slots) < 1:
        raise UsageError(f"{where}host {name!r} has {slots} slots: expected 1 or more")
    return Host(name.strip("[]"), int(slots or 1))


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
        return {name: address for name, address in self.interfaces.items() if not is_loopback(address)}

    def list_interfaces(self) -> str:
        return ", ".join(f"{name} ({address})" for name, address in self.interfaces.items())


def probe_host(port: int = 0, addresses: Sequence[str] = ()) -> ProbedHost:
    """Return the facts of this host, and which of the addresses it cannot reach."""
    with socket.create_server(("", 0)) as free:
        free_port = free.getsockname()[1]
    # In a step of srun it is that of the shell in which srun was typed.
    connection = "" if slurm.is_step(os.environ) else os.environ.get("SSH_CONNECTION", "")
    client, _, server, *_ = (connection or "  ").split(" ")
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


@dataclass(frozen=True)
class ReachedHosts:
    """The hosts of a job after probing.

    The other hosts reach this one at `local_addresses`. All hosts reach the first one by the interfaces in `networks`,
    which is empty if no host has another interface.
    """

    hosts: tuple[Host, ...]
    rendezvous: RendezvousAddress
    local_addresses: tuple[str, ...]
    cores: tuple[int, ...]
    networks: tuple[str, ...]


def is_local_host(name: str) -> bool:
    """Return True if the name is one of this host, which can bind to its address."""
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
    """Probe the hosts; LaunchError names the first that cannot take part, and why."""
    known = [replace(host, is_local=is_local_host(host.name)) for host in hosts]
    return evaluate_hosts(known, interface, probe_host(), lambda names, target: _probe(names, target, site, env))


def evaluate_hosts(
    hosts: Sequence[Host],
    interface: str | None,
    here: ProbedHost,
    probe: Callable[[Sequence[str], Sequence[str]], list[ProbedHost]],
) -> ReachedHosts:
    """Probe the first host, then from each other host whether it reaches the first one."""
    first = here if hosts[0].is_local else probe([hosts[0].name], ())[0]
    facts = {hosts[0].name: first}
    if interface is None:
        address, tried = first.server, list(first.networks().values())
    else:
        address = first.interfaces.get(interface, "")
        tried = [address] if address else []
    others = [host.name for host in hosts[1:] if not host.is_local]
    facts.update(zip(others, probe(others, (str(first.port), *tried)), strict=True))
    facts.update({host.name: here for host in hosts if host.is_local})
    _check_facts(facts, interface, hosts[0].name, address)
    clients = [probed.client for probed in facts.values() if probed.client and probed is not here]
    if not address:  # the first host is this one: take its address as ssh's servers see it
        address = next(iter(clients), "127.0.0.1")
    local_addresses = tuple(dict.fromkeys([*clients, *here.networks().values()]))
    cores = tuple(facts[host.name].cores for host in hosts)
    networks = _connecting_networks(first, list(facts.values()))
    return ReachedHosts(tuple(hosts), RendezvousAddress(address, first.port), local_addresses, cores, networks)


def _connecting_networks(first: ProbedHost, hosts: Sequence[ProbedHost]) -> tuple[str, ...]:
    known = {name for probed in hosts for name in probed.networks()}
    shared = tuple(
        name
        for name, address in first.networks().items()
        if all(name in probed.interfaces and address not in probed.unreachable for probed in hosts)
    )
    return () if known == set(shared) else shared


def check_interface(host: str, facts: ProbedHost, interface: str | None) -> None:
    """Raise LaunchError if the host lacks the named interface."""
    if interface is not None and interface not in facts.interfaces:
        known = facts.list_interfaces()
        raise LaunchError(f"host {host!r} has no network interface {interface!r} with an address; it has {known}")


def _check_facts(facts: Mapping[str, ProbedHost], interface: str | None, first: str, address: str) -> None:
    for name, probed in facts.items():
        check_interface(name, probed, interface)
        if probed.version != __version__:
            versions = f"{probed.version}, and this one {__version__}"
            raise LaunchError(f"host {name!r} has dualdist {versions}: install the same")
    for name, probed in facts.items():
        if reason := probed.unreachable.get(address):
            which = f"interface {interface}" if interface is not None else "the one by which ssh reached it"
            raise LaunchError(
                f"host {name!r} cannot reach host {first!r} at {address} ({which}): {reason}; "
                f"{first} has {facts[first].list_interfaces()}: name one that both share by --network-interface"
            )


def _probe(hosts: Sequence[str], target: Sequence[str], site: Site, env: Mapping[str, str]) -> list[ProbedHost]:
    """Probe hosts concurrently."""
    found: list[ProbedHost] = []
    for start in range(0, len(hosts), MAX_CONCURRENT):
        some, deadline = hosts[start : start + MAX_CONCURRENT], Deadline(PROBE_S)
        with ExitStack() as stack:
            argvs = [ssh.remote_python_argv(host, site, env, ("-m", "dualdist.launch.hosts", *target)) for host in some]
            for peer in [stack.enter_context(start_peer(*each, site)) for each in zip(some, argvs, strict=True)]:
                reply = peer.exchange("answer its probe", deadline)
                try:
                    found.append(ProbedHost(**reply))
                except TypeError as error:
                    unreadable = f"host {peer.name!r} answered {reply}, which is not this dualdist's format"
                    raise LaunchError(unreadable) from error
    return found


if __name__ == "__main__":
    _port, *_addresses = sys.argv[1:] or ["0"]
    sys.stdout.write(json.dumps(asdict(probe_host(int(_port), _addresses))) + "\n")

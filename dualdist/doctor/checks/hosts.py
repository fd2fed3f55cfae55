"""Several hosts: what each lacks, whether they reach and know each other, and whether they are alike."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dualdist.doctor.checks.host import of_limits
from dualdist.doctor.checks.network import of_name
from dualdist.doctor.facts import HostFacts
from dualdist.doctor.findings import Finding

SKEW_S = 1.0
ALIKE = ("dualdist", "torch", "python", "horovod", "mpi4py")


@dataclass(frozen=True)
class HostReport:
    """What a host of the job said: `name` is how it was called, and `problem` why it said nothing.

    `reached` tells by the name of each other host, and by address and port there, why it was not reached ("" where it
    was); `names` gives the addresses under which this host knows the others. Its clock is `skew_s` ahead of ours, give
    or take `skew_error_s`.
    """

    name: str
    slots: int = 1
    problem: str = ""
    host: HostFacts | None = None
    skew_s: float = 0.0
    skew_error_s: float = 0.0
    reached: Mapping[str, Mapping[tuple[str, int], str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def find(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    """What is wrong with these hosts for one job on all of them."""
    size = sum(each.slots for each in hosts)
    for each in hosts:
        if each.host is None:
            yield Finding(
                "host-unusable",
                "error",
                each.problem,
                "every host of a job is reached by ssh, and has the same folder and the same Python",
                f"ssh {each.name} true, until it says nothing and asks nothing",
            )
            continue
        found = [*of_limits(each.host, each.slots, size), *of_name(each.host, is_spread=len(hosts) > 1)]
        yield from (replace(finding, seen=f"host {each.name}: {finding.seen}") for finding in found)
        yield from _of_names(each)
        yield from _of_reach(each)
        yield from _of_clock(each)
    yield from _of_versions([each for each in hosts if each.host is not None])


def _of_names(each: HostReport) -> Iterator[Finding]:
    for other, address in each.names.items():
        if _is_address(other):
            continue
        if not address:
            yield Finding(
                "host-name-unknown",
                "error",
                f"host {each.name} does not know the name {other}",
                "torchrun, mpirun and horovodrun tell every host the names of the others",
                f"add {other} to /etc/hosts of {each.name}, or name the hosts by addresses",
            )
        elif address.startswith("127."):
            yield Finding(
                "host-name-is-loopback",
                "error",
                f"on host {each.name} the name {other} leads to {address}",
                "that is the host itself",
                f"give {other} the address of its network in /etc/hosts of {each.name}",
            )


def _of_reach(each: HostReport) -> Iterator[Finding]:
    for other, calls in each.reached.items():
        addresses = list(dict.fromkeys(address for address, _ in calls))
        good = [address for address in addresses if any(not why for (at, _), why in calls.items() if at == address)]
        failed = {target: why for target, why in calls.items() if why}
        if not addresses:
            yield Finding(
                "no-network",
                "error",
                f"host {other} has no network but loopback",
                "nobody can reach it",
                "in a container: docker run --network host",
            )
        elif not good:
            (address, port), why = next(iter(failed.items()))
            yield Finding(
                "hosts-cut-off",
                "error",
                f"host {each.name} cannot open a connection to {other} ({address} port {port}): {why}",
                "ranks listen on ports that the system chooses; ssh alone is not enough",
                f"open all TCP ports between the hosts of a job: ufw allow from <address of {each.name}>, or "
                "firewall-cmd --zone=trusted --add-source=<its network>, or the cloud's security group, on both sides",
            )
        else:
            yield from _of_part(each.name, other, good, failed)


def _of_part(name: str, other: str, good: Sequence[str], failed: Mapping[tuple[str, int], str]) -> Iterator[Finding]:
    """One host reaches another, but not by all of its addresses and ports."""
    ports = [f"{port} ({why})" for (address, port), why in failed.items() if address in good]
    if ports:
        yield Finding(
            "port-blocked",
            "warning",
            f"host {name} reaches {other}, but not its port {', '.join(ports)}",
            "a rank that happens to listen there is not found; 29500 is where torchrun's and many scripts' rank 0 is",
            "open all TCP ports between the hosts of a job, or choose MASTER_PORT among those that are open",
        )
    lost = sorted({address for address, _ in failed if address not in good})
    if lost:
        yield Finding(
            "networks-not-shared",
            "warning",
            f"host {name} reaches {other} at {', '.join(good)}, and not at {', '.join(lost)}",
            "libraries that choose another network than the one that all hosts share do not connect",
            "dualdist run --network-interface NAME, or NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, with the interface "
            f"that has {good[0]}",
        )


def _of_clock(each: HostReport) -> Iterator[Finding]:
    if abs(each.skew_s) - each.skew_error_s > SKEW_S:
        yield Finding(
            "clock-skew",
            "warning",
            f"the clock of host {each.name} is {abs(each.skew_s):.1f} s {'ahead' if each.skew_s > 0 else 'behind'} "
            f"(give or take {each.skew_error_s:.3f} s)",
            "logs, file times and make disagree between the hosts; from minutes on, munge (Slurm) and TLS refuse",
            f"ssh {each.name} timedatectl set-ntp true, as root, or start chronyd there",
        )


def _of_versions(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    for package in ALIKE:
        found = {each.name: each.host.versions.get(package) for each in hosts if each.host is not None}
        listed = ", ".join(f"{name} has {version or 'none'}" for name, version in found.items())
        if len(set(found.values())) > 1:
            yield Finding(
                "versions-differ",
                "error" if package == "dualdist" or (package == "torch" and None in found.values()) else "warning",
                f"{package} differs: {listed}",
                "ranks of different versions need not understand each other",
                f"install the same {package} on every host, best by one environment that all share",
            )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

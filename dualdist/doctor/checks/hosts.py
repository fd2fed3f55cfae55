"""Several hosts: limits, names, connections between them, clocks and package versions."""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dualdist.doctor.checks import Finding, error, warning
from dualdist.doctor.checks.host import check_limits
from dualdist.doctor.checks.network import check_hostname
from dualdist.doctor.facts import HostFacts

MAX_SKEW_S = 1.0
COMPARED_PACKAGES = ("dualdist", "torch", "python", "horovod", "mpi4py")


@dataclass(frozen=True)
class HostReport:
    """Results of probing one host; `facts` is None if that failed because of `problem`.

    Its clock is `skew_s` ahead of ours, +- `skew_error_s`. For each other host, `connections` maps (address, port) to
    the error, "" for success, and `resolved` has the address to which its name resolves.
    """

    name: str
    slots: int = 1
    problem: str = ""
    facts: HostFacts | None = None
    skew_s: float = 0.0
    skew_error_s: float = 0.0
    connections: Mapping[str, Mapping[tuple[str, int], str]] = field(default_factory=dict)
    resolved: Mapping[str, str] = field(default_factory=dict)


def find(reports: Sequence[HostReport]) -> Iterator[Finding]:
    size = sum(report.slots for report in reports)
    for report in reports:
        if report.facts is None:
            yield error(
                "host-unusable",
                report.problem,
                "every host of a job must be reachable by ssh and have the same folder and the same Python",
                f"ssh {report.name} true, until it prints nothing and asks nothing",
            )
            continue
        limits = check_limits(report.facts, report.slots, size)
        for finding in (*limits, *check_hostname(report.facts, is_multi_node=len(reports) > 1)):
            yield replace(finding, message=f"host {report.name}: {finding.message}")
        yield from _check_names(report)
        yield from _check_connections(report)
        yield from _check_clock(report)
    yield from _check_versions({report.name: report.facts.versions for report in reports if report.facts is not None})


def _check_names(report: HostReport) -> Iterator[Finding]:
    for other, address in report.resolved.items():
        if not address and not _is_address(other):
            yield error(
                "host-name-unknown",
                f"host {report.name} cannot resolve the name {other}",
                "torchrun, mpirun and horovodrun pass host names to every host",
                f"add {other} to /etc/hosts of {report.name}, or use addresses instead of names",
            )
        elif address.startswith("127.") and not _is_address(other):
            yield error(
                "host-name-is-loopback",
                f"on host {report.name} the name {other} resolves to {address}",
                "that is the host itself",
                f"give {other} its network address in /etc/hosts of {report.name}",
            )


def _check_connections(report: HostReport) -> Iterator[Finding]:
    for other, connections in report.connections.items():
        reached = list(dict.fromkeys(address for (address, _), failure in connections.items() if not failure))
        failed = {target: failure for target, failure in connections.items() if failure}
        if not connections:
            yield error(
                "no-network",
                f"host {other} has no interface but loopback",
                "no other host can connect to it",
                "in a container: docker run --network host",
            )
        elif not reached:
            (address, port), failure = next(iter(failed.items()))
            yield error(
                "hosts-cut-off",
                f"host {report.name} cannot connect to {other} ({address} port {port}): {failure}",
                "ranks listen on ports that the system chooses; an open ssh port is not enough",
                "open all TCP ports between the hosts of a job, on both sides: ufw allow from "
                f"<address of {report.name}>, or firewall-cmd --zone=trusted --add-source=<its network>, or the "
                "cloud's security group",
            )
        blocked = [f"{port} ({failure})" for (address, port), failure in failed.items() if address in reached]
        if blocked:
            yield warning(
                "port-blocked",
                f"host {report.name} can connect to {other}, but not to its port {', '.join(blocked)}",
                "a rank that listens there is unreachable; 29500 is the default port of torchrun and many scripts",
                "open all TCP ports between the hosts of a job, or set MASTER_PORT to an open one",
            )
        unreached = sorted({address for address, _ in failed if address not in reached})
        if reached and unreached:
            yield warning(
                "networks-not-shared",
                f"host {report.name} can connect to {other} at {', '.join(reached)}, but not at {', '.join(unreached)}",
                "libraries that choose a network that is not shared by all hosts cannot connect",
                "dualdist run --network-interface, or NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: the interface with "
                f"{reached[0]}",
            )


def _check_clock(report: HostReport) -> Iterator[Finding]:
    if abs(report.skew_s) - report.skew_error_s > MAX_SKEW_S:
        yield warning(
            "clock-skew",
            f"the clock of host {report.name} is {abs(report.skew_s):.1f} s "
            f"{'ahead' if report.skew_s > 0 else 'behind'} (+- {report.skew_error_s:.3f} s)",
            "logs, file times and make disagree between hosts; from minutes on, munge (Slurm) and TLS fail",
            f"ssh {report.name} timedatectl set-ntp true, as root, or start chronyd there",
        )


def _check_versions(versions: Mapping[str, Mapping[str, str | None]]) -> Iterator[Finding]:
    for package in COMPARED_PACKAGES:
        installed = {name: each.get(package) for name, each in versions.items()}
        if len(set(installed.values())) > 1:
            listed = ", ".join(f"{name} has {version or 'none'}" for name, version in installed.items())
            is_error = package == "dualdist" or (package == "torch" and None in installed.values())
            yield Finding(
                "error" if is_error else "warning",
                "versions-differ",
                f"{package} differs: {listed}",
                "ranks with different versions may be incompatible",
                f"install the same {package} on every host, preferably one shared environment",
            )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

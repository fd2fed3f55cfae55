"""Network: interfaces, names, and where rank 0 is said to be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dualdist.doctor.context import DoctorContext
from dualdist.doctor.facts import HostFacts
from dualdist.doctor.findings import Finding
from dualdist.environments.env_values import get_value
from dualdist.launch.env_defaults import INTERFACE_VARIABLES
from dualdist.utils.network_interfaces import LOOPBACK

SLOW_S = 1.0
# Bridges of containers and virtual machines: every host has one, of the same address, and none leads to another host.
# Docker calls those of its networks br-, and twelve digits.
BRIDGES = re.compile(r"docker|virbr|lxcbr|lxdbr|podman|cni|br-[0-9a-f]{12}$")
OPENMPI_INTERFACES = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude")


def find(case: DoctorContext) -> Iterator[Finding]:
    """What is wrong with this host's network, for the job that this process is in."""
    yield from _of_interfaces(case)
    yield from of_name(case.facts.host, is_spread=case.is_spread)
    yield from _of_master(case)


def of_name(host: HostFacts, *, is_spread: bool) -> Iterator[Finding]:
    """What a host's own name leads to; also for hosts that are asked by ssh."""
    if not host.address:
        yield Finding(
            "hostname-unresolved",
            "warning" if is_spread else "info",
            f"this host's own name, {host.name}, does not resolve",
            "torchrun, Gloo and Open MPI look it up when they are not told an interface",
            f"add a line to /etc/hosts, as root: echo '127.0.1.1 {host.name}' >>/etc/hosts"
            + (", with the address of its network instead, as several hosts take part" if is_spread else ""),
        )
    elif is_spread and host.address.startswith("127."):
        yield Finding(
            "hostname-is-loopback",
            "warning",
            f"this host's own name, {host.name}, leads to {host.address}",
            "a program that tells other hosts this address is not found by them: torch's Gloo does, where no "
            "interface is named; dualdist names one",
            f"give {host.name} the address of its network in /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    if host.resolve_s > SLOW_S:
        yield Finding(
            "hostname-slow",
            "warning",
            f"looking up this host's own name, {host.name}, took {host.resolve_s:.1f} s",
            "every rank does that when it starts, some libraries several times",
            f"add {host.name} to /etc/hosts, or take name servers out of /etc/resolv.conf that do not answer",
        )
    if host.reverse_s > SLOW_S:
        yield Finding(
            "reverse-lookup-slow",
            "warning",
            f"looking up whose address {host.address or LOOPBACK} is took {host.reverse_s:.1f} s",
            "torch's store, at which ranks meet, does that for each rank that connects, and answers nobody meanwhile",
            "take name servers that do not answer out of /etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1'",
        )


def _of_interfaces(case: DoctorContext) -> Iterator[Finding]:
    host = case.facts.host
    for name in INTERFACE_VARIABLES:
        asked = get_value(case.environ, name)
        if asked is not None and (wrong := _absent(name, asked, host)):
            yield Finding(
                "interface-missing",
                "error",
                f"{name}={asked}, but this host has no interface {wrong} with an address",
                "the library that reads it ends where the interface is not there",
                f"name one of {_listed(host)}, or unset {name}",
            )
    if not case.is_spread:
        return
    if not host.networks():
        yield Finding(
            "no-network",
            "error",
            "this host has no network but loopback, and the job is on several hosts",
            "the ranks of other hosts cannot be reached",
            "in a container: docker run --network host",
        )
    bridges = [name for name in host.networks() if BRIDGES.match(name)]
    if bridges and case.topology is not None and case.topology.mpi:
        if not any(get_value(case.environ, name) for name in OPENMPI_INTERFACES):
            yield Finding(
                "bridges",
                "warning",
                f"this host has {', '.join(bridges)}, as other hosts may have, by the same address",
                "Open MPI takes every network for one that all hosts share, and hangs in the first allreduce",
                f"mpirun --mca btl_tcp_if_exclude lo,{','.join(bridges)}; dualdist run -H finds out by itself",
            )
    elif len(host.networks()) > 1 and not any(get_value(case.environ, name) for name in INTERFACE_VARIABLES):
        yield Finding(
            "several-networks",
            "info",
            f"this host has several networks: {_listed(host)}",
            "where the hosts share only one of them, libraries may take another one",
            "if ranks do not find each other: dualdist run --network-interface, or GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME",
        )


def _of_master(case: DoctorContext) -> Iterator[Finding]:
    topology, problem = case.topology, case.facts.master_problem
    if topology is None or topology.address is None or topology.size == 1:
        return
    if problem:
        yield Finding(
            "master-unresolved",
            "error",
            f"rank 0 is to be met at {topology.address}: {problem}",
            "no rank finds the others",
            "set MASTER_ADDR to a name or address that every host knows",
        )
    elif case.is_spread and (topology.address == "localhost" or topology.address.startswith("127.")):
        yield Finding(
            "master-is-loopback",
            "error",
            f"rank 0 is to be met at {topology.address}, and the job is on {topology.num_nodes} hosts",
            "on every host that is the host itself",
            "set MASTER_ADDR to the name of the host with rank 0",
        )


def _absent(variable: str, asked: str, host: HostFacts) -> str:
    """The first interface that a variable names, and the host lacks.

    NCCL takes beginnings of names, exact ones after "=", and leaves out those after "^"; the others take names.
    """
    if variable.startswith("NCCL"):
        if asked.startswith("^"):
            return ""
        words, is_exact = asked.removeprefix("=").split(","), asked.startswith("=")
        has_any = any(name == word if is_exact else name.startswith(word) for word in words for name in host.interfaces)
        return "" if has_any else asked
    return next((word for word in asked.split(",") if word.strip() not in host.interfaces), "")


def _listed(host: HostFacts) -> str:
    return ", ".join(f"{name} ({address})" for name, address in host.networks().items()) or "none"

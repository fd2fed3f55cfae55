"""Network: interfaces, host names, and the address of rank 0."""

import re
from collections.abc import Iterator

from dualdist.doctor.checks import DoctorContext, Finding, error, warning
from dualdist.doctor.facts import HostFacts
from dualdist.environments.env_values import get_value
from dualdist.launch.env_defaults import INTERFACE_VARIABLES
from dualdist.utils.network_interfaces import LOOPBACK, is_loopback

SLOW_LOOKUP_S = 1.0
# Bridges of containers and virtual machines have the same address on every host, and none leads to another host.
# Docker names its networks' bridges br- and twelve hexadecimal digits.
BRIDGES = re.compile(r"docker|virbr|lxcbr|lxdbr|podman|cni|br-[0-9a-f]{12}$")
OPENMPI_INTERFACES = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude")


def find(context: DoctorContext) -> Iterator[Finding]:
    yield from _check_interfaces(context)
    yield from check_hostname(context.facts.host, is_multi_node=context.is_multi_node)
    yield from _check_master(context)


def check_hostname(host: HostFacts, *, is_multi_node: bool) -> Iterator[Finding]:
    """Yield problems of resolving the host's own name; used for remote hosts, too."""
    if not host.address:
        yield Finding(
            "warning" if is_multi_node else "info",
            "hostname-unresolved",
            f"this host's own name, {host.name}, does not resolve",
            "torchrun, Gloo and Open MPI look it up unless an interface is given",
            f"add a line to /etc/hosts, as root: echo '127.0.1.1 {host.name}' >>/etc/hosts"
            + (", with its network address instead, as the job uses several hosts" if is_multi_node else ""),
        )
    elif is_multi_node and host.address.startswith("127."):
        yield warning(
            "hostname-is-loopback",
            f"this host's own name, {host.name}, resolves to {host.address}",
            "torch's Gloo announces that address, which others cannot reach, unless given an interface, as by dualdist",
            f"give {host.name} its network address in /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    if host.reverse_lookup_s > SLOW_LOOKUP_S:
        yield warning(
            "reverse-lookup-slow",
            f"the reverse lookup of {host.address or LOOPBACK} took {host.reverse_lookup_s:.1f} s",
            "torch's TCPStore does one for each connecting rank, and serves no other rank meanwhile",
            "remove unresponsive name servers from /etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1'",
        )


def _check_interfaces(context: DoctorContext) -> Iterator[Finding]:
    host, environ = context.facts.host, context.environ
    for variable in INTERFACE_VARIABLES:
        value = get_value(environ, variable)
        if value is not None and (missing := _missing_interface(variable, value, host)):
            yield error(
                "interface-missing",
                f"{variable}={value}, but this host has no interface {missing} with an address",
                "the library that reads this variable fails if the interface does not exist",
                f"choose one of {_list_interfaces(host)}, or unset {variable}",
            )
    if not context.is_multi_node:
        return
    external = host.external_interfaces()
    if not external:
        yield error(
            "no-network",
            "this host has no interface but loopback, and the job is on several hosts",
            "ranks on other hosts are unreachable",
            "in a container: docker run --network host",
        )
    bridges = [name for name in external if BRIDGES.match(name)]
    is_excluded = any(get_value(environ, name) for name in OPENMPI_INTERFACES)
    if bridges and not is_excluded and context.topology is not None and context.topology.mpi:
        yield warning(
            "bridges",
            f"this host has the bridge(s) {', '.join(bridges)}; other hosts may have the same address",
            "Open MPI assumes that all hosts share every network, and hangs in the first allreduce",
            f"mpirun --mca btl_tcp_if_exclude lo,{','.join(bridges)}; dualdist run -H does so automatically",
        )


def _check_master(context: DoctorContext) -> Iterator[Finding]:
    topology = context.topology
    if topology is None or topology.address is None or topology.size == 1:
        return
    if context.facts.is_master_unresolved:
        yield error(
            "master-unresolved",
            f"the address of rank 0 is {topology.address}, which does not resolve",
            "no rank can connect to rank 0",
            "set MASTER_ADDR to a name or address that every host can resolve",
        )
    elif context.is_multi_node and is_loopback(topology.address):
        yield error(
            "master-is-loopback",
            f"the address of rank 0 is {topology.address}, but the job is on {topology.num_nodes} hosts",
            "on every host, that address is the host itself",
            "set MASTER_ADDR to the name of rank 0's host",
        )


def _missing_interface(variable: str, value: str, host: HostFacts) -> str:
    """Return the first interface in `value` that the host lacks, or "".

    NCCL's variables hold prefixes, exact names after "=", and exclusions after "^"; the others hold names.
    """
    if variable.startswith("NCCL"):
        if value.startswith("^"):
            return ""
        words, is_exact = value.removeprefix("=").split(","), value.startswith("=")
        has_any = any(name == word if is_exact else name.startswith(word) for word in words for name in host.interfaces)
        return "" if has_any else value
    return next((word for word in value.split(",") if word.strip() not in host.interfaces), "")


def _list_interfaces(host: HostFacts) -> str:
    return ", ".join(f"{name} ({address})" for name, address in host.external_interfaces().items()) or "none"

"""Rendezvous of `dualdist exec`: before the program starts, ranks agree on rank 0's address and a port, without torch.

Note [MPI last]: MPI starts once in a process, and the program may want to start it. So the ranks of one host connect to
a Unix socket that is named after their launcher's process. Only ranks on several hosts, under a launcher that has
neither an address nor a store, exchange the address by MPI, which then runs until the program ends.

Note [strangers]: any user of a host may bind and connect to the names of Linux's abstract namespace. So both sides drop
connections of other users, and there are several names, of which rank 0 takes the first that is free. Whoever connects
and sends nothing, there or at a port, keeps nobody waiting.
"""

import contextlib
import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dualdist.backends.mpi import world
from dualdist.environments.env_values import MASTER, RENDEZVOUS, get_integer, get_value
from dualdist.errors import RendezvousError, TopologyError, UsageError
from dualdist.rendezvous.address_exchange import (
    AddressExchange,
    BroadcastAddressExchange,
    publish_listener,
    rendezvous_endpoint,
)
from dualdist.rendezvous.rank_assignment import RankReport, assign_locations, make_report, with_location
from dualdist.topology import RankLocation, Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import LONGEST_POLL_S, Deadline, call_within
from dualdist.utils.network_interfaces import LOOPBACK, PROBE_S, StoreAddress

# Set by `dualdist run` where the ranks are on hosts that were given to it: where rank 0 listens.
RUN_RENDEZVOUS = "DUALDIST_RUN_RENDEZVOUS"
EXEC_SUFFIX = "-exec"
POLL_S = 0.02
UNIX_NAME = 100  # bytes at most, to which a number is added
UNIX_NAMES = 16
PEER = "3i"  # unix(7): struct ucred
# Connections that have sent less than a report, of which the oldest is dropped: a rank connects again.
MAX_SILENT = 64
MAX_REPORT_BYTES, MAX_ANSWER_BYTES = 1 << 16, 1 << 26
ERRORS = {kind.__name__: kind for kind in (TopologyError, RendezvousError)}


@dataclass(frozen=True)
class ExecRendezvous:
    """Rank 0's address as this rank reaches it, a port reserved there, and where all ranks are."""

    address: str
    port: int
    topology: Topology
    interface: str | None = None  # towards the other hosts


# Where rank 0 listens: the name of a Unix socket, an address and port, or what an exchange makes known.
Endpoint = str | tuple[str, int] | AddressExchange


def meet(topology: Topology, environ: MutableMapping[str, str], deadline: Deadline) -> ExecRendezvous:
    """Exchange the ranks' locations: each sends a report to rank 0, and is answered when all have come."""
    host = network_interfaces.host_identity(environ)
    report = make_report(topology, host, "exec")
    endpoint = _find_endpoint(topology, environ, deadline)
    if topology.rank == 0:
        with _listen(endpoint, topology, host) as listener:
            answer = _serve(listener, report, get_integer(environ, MASTER[1]) or 0, deadline)
        if not isinstance(endpoint, str | tuple):
            endpoint.withdraw()
    else:
        answer = _ask(endpoint, report, deadline)
    if answer["error"]:
        kind, message = answer["error"]
        raise ERRORS[kind](message)
    locations = [RankLocation(*location) for location in answer["locations"]]
    interface = None
    if len({location.host for location in locations}) > 1:
        is_local = locations[topology.rank].host == locations[0].host  # where the route to that address is loopback
        find = network_interfaces.find_interface if is_local else network_interfaces.interface_towards
        with contextlib.suppress(RendezvousError):
            interface = find(network_interfaces.resolve_address(answer["address"]))
    return ExecRendezvous(answer["address"], answer["port"], with_location(topology, locations), interface)


def _find_endpoint(topology: Topology, environ: MutableMapping[str, str], deadline: Deadline) -> Endpoint:
    if given := environ.get(RUN_RENDEZVOUS):
        return rendezvous_endpoint(topology, {RENDEZVOUS: given}, deadline)
    is_one_host = topology.num_nodes == 1 and "num_nodes" not in topology.inferred
    if topology.rendezvous in ("mpi", "slurm") and is_one_host and not get_value(environ, RENDEZVOUS):
        launcher = _find_launcher(dict(topology.origins)["rank"], environ)
        if launcher is not None:
            job = environ.get("PMIX_NAMESPACE", "")  # one daemon may start several jobs
            return f"\0dualdist-exec-{os.getuid()}-{launcher}-{job}"[:UNIX_NAME]
    endpoint = rendezvous_endpoint(topology, environ, deadline, EXEC_SUFFIX)
    if isinstance(endpoint, BroadcastAddressExchange):
        late = partial(world.start_timeout, topology, "MPI", deadline.timeout_s)
        call_within(deadline.left_s(), lambda: world.start(topology, environ), late)
    return endpoint


def _find_launcher(variable: str, environ: Mapping[str, str]) -> str | None:
    """Return the identity of the launcher's process on this host: the nearest ancestor without this rank's variable."""
    pid, assignment = os.getppid(), f"{variable}={environ[variable]}".encode()
    with contextlib.suppress(OSError):
        while pid > 0:
            # After the command in parentheses: state and parent; the 22nd field of all is the start.
            _, parent, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            inherited = False
            with contextlib.suppress(PermissionError):  # a daemon of root
                inherited = assignment in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not inherited:
                return f"{pid}-{fields[17]}"
            pid = int(parent)
    return None  # hidden, or a container with its own processes


def _listen(endpoint: Endpoint, topology: Topology, host: str) -> socket.socket:
    """Return rank 0's listening socket, and publish its address."""
    if isinstance(endpoint, str):
        return _listen_at(_unix_names(endpoint))
    if isinstance(endpoint, tuple):
        return network_interfaces.open_listener(endpoint[1], loopback_only=False)
    return publish_listener(endpoint, topology, host)


def _unix_names(endpoint: str) -> list[str]:
    return [f"{endpoint}-{number}" for number in range(UNIX_NAMES)]


def _listen_at(names: list[str]) -> socket.socket:
    """Return a socket that listens at the first name that no other user holds: Note [strangers]."""
    listener = socket.socket(socket.AF_UNIX)
    for name in names:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(f"rank 0 cannot listen on a Unix socket ({error.strerror})") from error
            if (holder := _connect_to_own(name)) is not None:
                holder.close()
                raise TopologyError("two processes are rank 0: is one left over from another job?") from error
            continue
        listener.listen(socket.SOMAXCONN)
        return listener
    raise RendezvousError(
        "other users of this host hold the names by which its ranks meet: set MASTER_ADDR and MASTER_PORT, "
        f"or {RENDEZVOUS}=file:///a/folder/name"
    )


def _connect_to_own(name: str) -> socket.socket | None:
    """Return a connection to the process of this user that listens at the name, or None, without waiting."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    with contextlib.suppress(OSError):  # nobody listens there, or nobody accepts
        connection.connect(name)
        if _is_own(connection):
            return connection
    connection.close()
    return None


def _is_own(connection: socket.socket) -> bool:
    """Return True unless another user's process is at the other end of a Unix socket."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(PEER))
    return bool(struct.unpack(PEER, credentials)[1] == os.getuid())


def _serve(listener: socket.socket, own: RankReport, wanted_port: int, deadline: Deadline) -> dict[str, Any]:
    """Collect the reports of all ranks, and answer each; return the answer for rank 0 itself."""
    peers: list[tuple[socket.socket, str]] = []
    error, locations = list[str](), list[tuple[Any, ...]]()
    try:
        locations = [astuple(location) for location in assign_locations(_collect(listener, own, peers, deadline))]
    except (TopologyError, RendezvousError) as problem:
        error = [type(problem).__name__, str(problem)]
    listener.close()  # before the answers: the program may listen on the same port
    address = next((reached for _, reached in peers if reached), LOOPBACK)
    answer = {"error": error, "locations": locations, "address": address, "port": reserve_port(wanted_port)}
    for connection, reached in peers:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(PROBE_S)
            connection.sendall(f"{json.dumps({**answer, 'address': reached or address})}\n".encode())
    return answer


def _collect(
    listener: socket.socket, own: RankReport, peers: list[tuple[socket.socket, str]], deadline: Deadline
) -> list[RankReport]:
    """Return the reports of all ranks; each one's connection, and rank 0's address if remote, is added to `peers`."""
    reports = {own.rank: own}
    with contextlib.closing(_receive_lines(listener, deadline)) as lines:
        for connection, line in lines if own.size > 1 else ():
            try:
                hello = json.loads(line)
                other, reached = RankReport.loads(hello["report"]), str(hello["reached"])
                peer_rank, peer_size = int(other.rank), int(other.size)
            except (ValueError, TypeError, KeyError, RecursionError):  # a probe, or a stranger
                connection.close()
                continue
            peers.append((connection, reached))
            if peer_size != own.size:
                raise TopologyError(
                    f"rank {peer_rank} of {peer_size} met ranks of a job of {own.size}: were all started by one "
                    "command?"
                )
            if peer_rank in reports:
                raise TopologyError(
                    f"two processes are rank {peer_rank} of {own.size}: is one left over from another job?"
                )
            reports[peer_rank] = other
            if len(reports) == own.size:
                break
    missing = [rank for rank in range(own.size) if rank not in reports]
    if len(reports) < own.size:
        raise RendezvousError(
            f"rank 0 waited {deadline.timeout_s:g} s for all {own.size} ranks to start; missing: {missing}"
        )
    return [reports[rank] for rank in sorted(reports)]


def _receive_lines(listener: socket.socket, deadline: Deadline) -> Generator[tuple[socket.socket, bytes], None, None]:
    """Yield each connection of this user that sends a line, with the line, until the deadline: Note [strangers]."""
    received: dict[socket.socket, bytes] = {}  # less than a line
    listener.setblocking(False)
    try:
        while not deadline.passed():
            for connection in _readable([listener, *received], deadline):
                if connection is listener:
                    received.update(dict.fromkeys(_accept(listener), b""))
                    continue
                before, data = received.pop(connection), _read(connection)
                if b"\n" in data:
                    yield connection, before + data.partition(b"\n")[0]
                elif data and len(before) < MAX_REPORT_BYTES:
                    received[connection] = before + data
                else:
                    connection.close()
            for connection in list(received)[:-MAX_SILENT]:
                del received[connection]
                connection.close()
    finally:
        for connection in received:
            connection.close()


def _readable(sockets: Sequence[socket.socket], deadline: Deadline) -> list[socket.socket]:
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(1000 * min(LONGEST_POLL_S, deadline.left_s()))}
    return [each for each in sockets if each.fileno() in ready]


def _accept(listener: socket.socket) -> list[socket.socket]:
    """Return the next connection, unless it is another user's."""
    try:
        connection = listener.accept()[0]
    except OSError:  # it is gone, or no file descriptor is left
        time.sleep(POLL_S)
        return []
    if not _is_own(connection):
        connection.close()
        return []
    connection.setblocking(False)
    return [connection]


def _read(connection: socket.socket) -> bytes:
    """Return what has come, b"" at the end."""
    with contextlib.suppress(OSError):
        return connection.recv(MAX_REPORT_BYTES)
    return b""


def _ask(endpoint: Endpoint, report: RankReport, deadline: Deadline) -> dict[str, Any]:
    """Send the report to rank 0 and return its answer."""
    while True:
        try:
            connection, reached = _connect(endpoint, report.host, deadline)
            with connection:
                hello = {"report": report.dumps(), "reached": reached}
                connection.sendall(f"{json.dumps(hello)}\n".encode())
                return _receive(connection, deadline)
        except UsageError:
            raise
        except (OSError, ValueError, TypeError, RecursionError, RendezvousError) as error:
            if deadline.passed() or isinstance(endpoint, BroadcastAddressExchange):
                where = "" if isinstance(endpoint, str | tuple) else f" {endpoint.describe()}"
                raise RendezvousError(
                    f"rank {report.rank} waited {deadline.timeout_s:g} s for all {report.size} ranks to start, "
                    f"and rank 0 did not answer{where} ({error}): did one of them end?"
                ) from error
        deadline.sleep(POLL_S)


def _connect(endpoint: Endpoint, host: str, deadline: Deadline) -> tuple[socket.socket, str]:
    """Connect to rank 0 once; return the connection, and rank 0's address if it is on another host."""
    timeout_s = max(0.1, min(PROBE_S, deadline.left_s()))
    if isinstance(endpoint, str):
        found = next(filter(None, map(_connect_to_own, _unix_names(endpoint))), None)
        if found is None:
            raise RendezvousError("it does not listen yet")
        found.settimeout(timeout_s)
        return found, ""
    if isinstance(endpoint, tuple):
        try:
            return socket.create_connection(endpoint, timeout_s), endpoint[0]
        except UnicodeError as error:
            raise UsageError(f"rank 0 at {endpoint[0][:80]!r}:{endpoint[1]}: not a host name") from error
    text = endpoint.read()
    if text is None:
        raise RendezvousError("no address there yet")
    published = StoreAddress.loads(text)
    address = published.reachable_address(host, deadline)
    return socket.create_connection((address, published.port), timeout_s), "" if address == LOOPBACK else address


def _receive(connection: socket.socket, deadline: Deadline) -> dict[str, Any]:
    """Return the message of one line; ValueError if the connection is closed first."""
    received = bytearray()
    while not received.endswith(b"\n") and len(received) < MAX_ANSWER_BYTES:
        connection.settimeout(max(deadline.left_s(), 0.001))
        data = connection.recv(MAX_REPORT_BYTES)
        if not data or deadline.passed():
            break
        received += data
    return dict(json.loads(received))


def reserve_port(wanted: int) -> int:
    """Return a free port, `wanted` if that is one, which this process keeps from others until the program listens.

    A socket that is bound, but does not listen, keeps all sockets off the port but those with SO_REUSEADDR, as
    torch's stores have.
    """
    keeper = socket.socket()
    try:
        keeper.bind(("", wanted))
    except OSError:
        keeper.close()
        return reserve_port(0)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    os.set_inheritable(keeper.fileno(), True)  # for a program that takes this process over
    port: int = keeper.getsockname()[1]
    keeper.detach()
    return port

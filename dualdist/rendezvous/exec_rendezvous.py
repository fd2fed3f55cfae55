"""Rendezvous of `dualdist exec`: before the program starts, ranks agree on rank 0's address and a port, without torch.

Note [MPI last]: MPI starts once in a process, and the program may want to start it. So the ranks of one host connect to
a Unix socket that is named after their launcher's process. Only ranks on several hosts, under a launcher that has
neither an address nor a store, exchange the address by MPI, which then runs until the program ends.

Any user of a host may hold a name of Linux's abstract namespace. So both sides drop connections of other users, and
there are several names, of which rank 0 takes the first that is free.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dualdist.backends.mpi import world
from dualdist.environments.env_values import MASTER, RENDEZVOUS, get_integer, get_value
from dualdist.errors import RendezvousError, TopologyError
from dualdist.rendezvous import line_store
from dualdist.rendezvous.address_exchange import AddressExchange, BroadcastAddressExchange, rendezvous_endpoint
from dualdist.rendezvous.line_store import LineStore
from dualdist.rendezvous.meeting import (
    READ_VERDICT_S,
    LocationExchange,
    address_of_rank_0,
    interface_between_nodes,
    open_store,
)
from dualdist.rendezvous.rank_assignment import make_report, with_location
from dualdist.topology import Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import Deadline, call_within
from dualdist.utils.network_interfaces import LOOPBACK
from dualdist.utils.unix_peer import connect_to_own

# Set by `dualdist run` where the ranks are on hosts that were given to it: where rank 0 listens.
RUN_RENDEZVOUS = "DUALDIST_RUN_RENDEZVOUS"
EXEC_SUFFIX = "-exec"
POLL_S = 0.02
UNIX_NAME = 100  # bytes at most, to which a number is added
UNIX_NAMES = 16
KEY = "exec"


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
    """Exchange the ranks' locations at a store that rank 0 serves, as dd.init() does, and agree on a port."""
    host, rank = network_interfaces.host_identity(environ), topology.rank
    report = make_report(topology, host, "exec")
    endpoint = _find_endpoint(topology, environ, deadline)
    if isinstance(endpoint, str):
        store = _meet_on_host(endpoint, rank, deadline)
    else:
        store = open_store(endpoint, topology, host, deadline, line_store.connect)
    has_port = isinstance(endpoint, tuple) and endpoint[1] == get_integer(environ, MASTER[1])  # on which rank 0 listens
    have_met = False
    try:
        locations = LocationExchange(store, report, KEY, deadline, "start").run()
        if rank == 0:
            wanted = get_integer(environ, MASTER[1]) or 0
            store.set(f"{KEY}/port", str(wanted if has_port else reserve_port(wanted)))
        port = int(store.get(f"{KEY}/port", deadline.left_s()))
        reached = address_of_rank_0(store, locations, rank, KEY, deadline)
        have_met = True
    except TimeoutError as error:
        raise RendezvousError(f"rank {rank} waited {deadline.timeout_s:g} s for rank 0 to choose a port") from error
    finally:
        store.close(deadline if have_met else Deadline(READ_VERDICT_S))
        if rank == 0 and not isinstance(endpoint, str | tuple):
            endpoint.withdraw()
    if rank == 0 and has_port:
        reserve_port(port)
    interface = None
    with contextlib.suppress(RendezvousError):
        interface = interface_between_nodes(reached, locations, rank)
    address = reached or (endpoint[0] if isinstance(endpoint, tuple) else LOOPBACK)
    return ExecRendezvous(address, port, with_location(topology, locations), interface)


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


def _meet_on_host(name: str, rank: int, deadline: Deadline) -> LineStore:
    """Connect to the store at the first of the names that no other user holds; rank 0 serves it."""
    names = [f"{name}-{number}" for number in range(UNIX_NAMES)]
    where = "a Unix socket named after the launcher"
    if rank == 0:
        return line_store.serve(_listen_at(names), LOOPBACK, where)
    while True:
        found = next(filter(None, map(connect_to_own, names)), None)
        if found is not None:
            return LineStore(found, LOOPBACK, where)
        if deadline.passed():
            raise RendezvousError(f"rank {rank} waited {deadline.timeout_s:g} s for rank 0 to start: did it end?")
        deadline.sleep(POLL_S)


def _listen_at(names: list[str]) -> socket.socket:
    """Return a socket that listens at the first name that no other user holds: Note [strangers]."""
    listener = socket.socket(socket.AF_UNIX)
    for name in names:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(f"rank 0 cannot listen on a Unix socket ({error.strerror})") from error
            if (holder := connect_to_own(name)) is not None:
                holder.close()
                raise TopologyError("two processes are rank 0: is one left over from another job?") from error
            continue
        listener.listen(socket.SOMAXCONN)
        return listener
    raise RendezvousError(
        "other users of this host hold the names by which its ranks meet: set MASTER_ADDR and MASTER_PORT, "
        f"or {RENDEZVOUS}=file:///a/folder/name"
    )


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

"""Bring rank 0's address to the other ranks: a variable, the store of Horovod's launcher, MPI, or a shared file.

Importing this imports no torch.
"""

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from dualdist.backends.mpi import world
from dualdist.environments.env_values import RENDEZVOUS
from dualdist.environments.horovodrun import STORE_ADDRESS, STORE_PORT
from dualdist.errors import RendezvousError, TopologyError, UsageError
from dualdist.topology import Topology
from dualdist.utils import network_interfaces
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import StoreAddress
from dualdist.utils.variables import SPAWN_RENDEZVOUS

RENDEZVOUS_DIR = "DUALDIST_RENDEZVOUS_DIR"
SLURM_SUBMIT_DIR = "SLURM_SUBMIT_DIR"
SLURM_STEP = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


class AddressExchange(Protocol):
    """Passes one line of text from rank 0 to the other ranks."""

    def publish(self, text: str) -> None:
        """Pass on the text; rank 0 calls this once."""

    def read(self) -> str | None:
        """Return the text, None while rank 0 has not published it; the other ranks call this."""

    def withdraw(self) -> None:
        """Remove the text if it stays; rank 0 calls this when every rank has read it."""
        return None

    def describe(self) -> str:
        """Say where the text is expected, for errors."""


@dataclass(frozen=True)
class FileAddressExchange:
    """A file in a folder that all ranks see, created by a rename and removed after rendezvous."""

    path: Path

    def publish(self, text: str) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix=f"{self.path.name}.", dir=self.path.parent) as folder:
                draft = Path(folder, self.path.name)
                draft.write_text(text)
                os.replace(draft, self.path)
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot write {self.path} ({error.strerror}), the file by which the ranks find each other: "
                f"name a folder that all ranks share and may write in {RENDEZVOUS_DIR}, "
                "or set MASTER_ADDR and MASTER_PORT"
            ) from error

    def read(self) -> str | None:
        with contextlib.suppress(OSError):
            os.listdir(self.path.parent)  # makes an NFS client look up the file again
            return self.path.read_text(errors="replace")
        return None

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def describe(self) -> str:
        return f"in the file {self.path}; is this folder shared by all nodes ({RENDEZVOUS_DIR} names another)?"


@dataclass(frozen=True)
class HorovodAddressExchange:
    """A key in the HTTP store of horovodrun, in the scope "dualdist"."""

    address: str
    port: int
    deadline: Deadline
    key: str = "rank0"

    def publish(self, text: str) -> None:
        if self._request("PUT", text.encode()) is None:
            raise RendezvousError(f"horovodrun's store at {self.address}:{self.port} refused rank 0's address")

    def read(self) -> str | None:
        return self._request("GET", None)

    def withdraw(self) -> None:
        with contextlib.suppress(RendezvousError):
            self._request("DELETE", None)

    def describe(self) -> str:
        return f"in horovodrun's store at {self.address}:{self.port}"

    def _request(self, method: str, body: bytes | None) -> str | None:
        import http.client  # needed by ranks of horovodrun alone, and a quarter of the time of `import dualdist`

        timeout_s = max(0.1, min(network_interfaces.PROBE_S, self.deadline.left_s()))
        try:
            connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout_s)
            with contextlib.closing(connection):
                connection.request(method, f"/dualdist/{self.key}", body)
                response = connection.getresponse()
                text = response.read().decode(errors="replace")
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: an invalid host name
            raise RendezvousError(
                f"horovodrun's store at {self.address}:{self.port} ({STORE_ADDRESS}, {STORE_PORT}) "
                f"does not answer ({error}): is horovodrun still running, and can this host reach it?"
            ) from error
        return text if response.status == http.HTTPStatus.OK else None


@dataclass(frozen=True)
class BroadcastAddressExchange(AddressExchange):
    """A broadcast of rank 0's text, None on the others; each rank calls publish or read once."""

    broadcast: Callable[[str | None], str]

    def publish(self, text: str) -> None:
        self.broadcast(text)

    def read(self) -> str | None:
        return self.broadcast(None)

    def describe(self) -> str:
        return "by broadcast"


def publish_listener(exchange: AddressExchange, topology: Topology, host: str) -> socket.socket:
    """Return rank 0's socket, which listens on a free port, after publishing its address."""
    one_node = topology.num_nodes == 1 and "num_nodes" not in topology.inferred
    listener = network_interfaces.open_listener(0, loopback_only=one_node)
    exchange.publish(StoreAddress.of(host, listener.getsockname()[1], one_node=one_node).dumps())
    return listener


def _address_of(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port and not parts.path:
            return parts.hostname, parts.port
    except ValueError:  # an invalid port
        pass
    raise UsageError(f"{RENDEZVOUS}={url!r}: expected tcp://host:port, with a port between 1 and 65535")


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        raise UsageError(f"{RENDEZVOUS}={url!r}: expected file:///folder/name or tcp://host:port")
    return Path(parts.path)


def rendezvous_endpoint(
    topology: Topology, environ: MutableMapping[str, str], deadline: Deadline, suffix: str = ""
) -> AddressExchange | tuple[str, int]:
    """Return the address and port at which rank 0 listens, or the exchange by which the other ranks learn it.

    Args:
        suffix: distinguishes a second rendezvous of one job from the first.
    """
    if topology.rendezvous == "spawn":
        return FileAddressExchange(Path(environ[SPAWN_RENDEZVOUS] + suffix))
    given = environ.get(RENDEZVOUS)
    if given and urlsplit(given).scheme == "tcp":
        return _address_of(given)
    if given:
        return FileAddressExchange(Path(f"{_path_of(given)}{suffix}"))
    if topology.rendezvous == "mpi":
        return BroadcastAddressExchange(lambda text: world.broadcast_text(text, topology, environ, deadline))
    if topology.rendezvous == "horovod":
        return HorovodAddressExchange(environ[STORE_ADDRESS], int(environ[STORE_PORT]), deadline, f"rank0{suffix}")
    if topology.rendezvous == "slurm":
        folder = environ.get(RENDEZVOUS_DIR) or environ.get(SLURM_SUBMIT_DIR) or str(Path.home())
        step = "-".join(environ[name] for name in SLURM_STEP if environ.get(name))
        return FileAddressExchange(Path(folder) / f".dualdist-{step}{suffix}")
    if topology.address is None or topology.port is None:
        raise TopologyError(
            f"the {topology.size} ranks have no address for rendezvous (from {topology.source}): "
            f"set MASTER_ADDR and MASTER_PORT, or {RENDEZVOUS}=file:///a/shared/folder/name"
        )
    return topology.address, topology.port

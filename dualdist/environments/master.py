"""Where rank 0 can be met: MASTER_ADDR and MASTER_PORT, set by torchrun or exported by hand in a job script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dualdist.environments.variables import RENDEZVOUS, integer, require, text
from dualdist.errors import TopologyError

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class Master:
    """The address and port of rank 0, or of the store that the launcher's agent serves for it."""

    address: str
    port: int
    agent: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether only ranks of one host can use the address."""
        return self.address in ("localhost", "::1") or self.address.startswith("127.")


def read_master(
    environ: Mapping[str, str], address_name: str = MASTER_ADDR, port_name: str = MASTER_PORT
) -> Master | None:
    """Rank 0's address and port; None unless both are set.

    One alone is no error where the launcher has another way for the ranks to meet: job scripts export a MASTER_PORT for one
    command out of many.
    """
    address, port = text(environ, address_name), integer(environ, port_name)
    if address is None or port is None:
        return None
    if not 0 < port < 65536:
        raise TopologyError(f"{port_name}={port}: a port is between 1 and 65535; set {port_name} to a free one")
    return Master(address, port, agent=text(environ, AGENT_STORE) == "True")


def require_master(
    environ: Mapping[str, str], size: int, address_name: str = MASTER_ADDR, port_name: str = MASTER_PORT
) -> Master | None:
    """Rank 0's address and port, an error where several ranks have no way to meet; DUALDIST_RENDEZVOUS is a way."""
    master = read_master(environ, address_name, port_name)
    if master is None and size > 1 and text(environ, RENDEZVOUS) is None:
        half = text(environ, address_name) is not None or text(environ, port_name) is not None
        if half:
            require(environ, (address_name, port_name), "a job of several ranks", f"{address_name}=... {port_name}=...")
        raise TopologyError(
            f"{address_name} and {port_name} not set, but the job has {size} ranks: they must know where rank 0 listens; "
            f"set both, or {RENDEZVOUS}=file:///a/shared/folder/name"
        )
    return master

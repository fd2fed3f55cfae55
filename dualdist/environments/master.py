"""Where rank 0 can be met: MASTER_ADDR and MASTER_PORT, set by torchrun or exported by hand in a job script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dualdist.environments.env_values import RENDEZVOUS, integer, present, shown, text
from dualdist.errors import TopologyError

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
MASTER = (MASTER_ADDR, MASTER_PORT)
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class Master:
    """The address and port of rank 0, or of the store that the launcher's agent serves in its place."""

    address: str
    port: int
    agent: bool = False
    names: tuple[str, str] = MASTER

    @property
    def is_loopback(self) -> bool:
        """Whether only ranks of one host can use the address."""
        return self.address in ("localhost", "::1") or self.address.startswith("127.")


def read_master(environ: Mapping[str, str], names: tuple[str, str] = MASTER) -> Master | None:
    """Rank 0's address and port; None unless both are set.

    One alone is no error here: the launcher has another way for the ranks to meet, and it is left over from elsewhere.
    """
    if len(present(environ, names)) < 2:
        return None
    address, port = text(environ, names[0]), integer(environ, names[1])
    assert address is not None
    assert port is not None
    if not 0 < port < 65536:
        raise TopologyError(f"{names[1]}={port}: a port is between 1 and 65535; set {names[1]} to a free one")
    return Master(address, port, text(environ, AGENT_STORE) == "True", names)


def require_master(
    environ: Mapping[str, str], size: int, size_name: str, names: tuple[str, str] = MASTER
) -> Master | None:
    """Rank 0's address and port; an error where several ranks have no way to meet. DUALDIST_RENDEZVOUS is one."""
    master = read_master(environ, names)
    if master is None and size > 1 and text(environ, RENDEZVOUS) is None:
        missing = [name for name in names if text(environ, name) is None]
        raise TopologyError(
            f"{' and '.join(missing)} not set, but {shown(environ, (size_name, *names))}: the ranks must know where "
            f"rank 0 listens; set both {' and '.join(names)}, or {RENDEZVOUS}=file:///a/shared/folder/name"
        )
    return master

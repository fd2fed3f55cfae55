"""Checks: pure functions from facts to findings, one module per subject; each has find(context).

To add a subject, write its module, and add it to CHECKS in diagnosis.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dualdist.backends.registry import Availability
from dualdist.doctor.facts import InstallationFacts
from dualdist.environments.env_values import get_value
from dualdist.rendezvous.backend_selection import BACKEND
from dualdist.topology import Topology
from dualdist.utils.package_probe import TorchProbe

EXIT_CODES = {"info": 0, "warning": 1, "error": 2}

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """A problem: an error will stop the job, a warning may; `fix` is what to do or type."""

    level: Level
    name: str
    message: str
    why: str
    fix: str


# Constructors: (name, message, why, fix).
error, warning, info = partial(Finding, "error"), partial(Finding, "warning"), partial(Finding, "info")


@dataclass(frozen=True)
class DoctorContext:
    """A process, its host and its job; `topology` is None where the launcher's variables are invalid.

    `local_ranks` ranks are on this host, or shall be started there if `is_planned` (`-np`).
    """

    facts: InstallationFacts
    environ: Mapping[str, str]
    topology: Topology | None
    backends: Mapping[str, Availability]
    local_ranks: int
    is_planned: bool

    @property
    def requested_backend(self) -> str | None:
        return get_value(self.environ, BACKEND)

    @property
    def visible_gpus(self) -> int:
        """Number of GPUs that torch can use."""
        return self.facts.torch.gpus if isinstance(self.facts.torch, TorchProbe) else 0

    @property
    def launcher(self) -> str:
        return "none" if self.topology is None else self.topology.launcher

    @property
    def is_distributed(self) -> bool:
        """True if a launcher started this process as one of several ranks."""
        return self.topology is not None and self.topology.size > 1

    @property
    def is_multi_node(self) -> bool:
        return self.topology is not None and self.topology.num_nodes > 1

"""The input and the output of every check: DoctorContext and Finding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dualdist.backends.availability import Availability
from dualdist.doctor.collect import InstallationFacts
from dualdist.environments.env_values import get_value
from dualdist.rendezvous.backend_selection import BACKEND, TRANSPORT
from dualdist.topology import Topology
from dualdist.utils.package_probe import TorchProbe

EXIT_CODES = {"info": 0, "warning": 1, "error": 2}

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """A problem: an error will stop the job, a warning may.

    Attributes:
        name: identifier, stable between releases.
        message: what was found.
        why: why it matters.
        fix: what to do or type.
        command: the command line that `--fix` runs, () where no command is safe to run unattended.
    """

    name: str
    level: Level
    message: str
    why: str
    fix: str
    command: tuple[str, ...] = ()


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 without problems, 1 if something may fail, 2 if something will."""
    return max((EXIT_CODES[finding.level] for finding in findings), default=0)


@dataclass(frozen=True)
class DoctorContext:
    """A process, its host and its job.

    Attributes:
        topology: None where the launcher's variables are invalid.
        local_ranks: ranks on this host, started or planned.
        is_planned: True if the user gave that number (`-np`).
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

    @property
    def requires_mpi(self) -> bool:
        return "mpi" in (self.requested_backend, get_value(self.environ, TRANSPORT))

    @property
    def requires_horovod(self) -> bool:
        requested = self.requested_backend
        return requested == "horovod" or (requested in (None, "auto") and self.launcher == "horovodrun")

    def pip_command(self, *args: str) -> tuple[str, ...]:
        return (self.facts.python, "-m", "pip", *args)

    def dualdist_command(self, *args: str) -> tuple[str, ...]:
        return (self.facts.python, "-m", "dualdist", *args)

"""What findings are functions of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dualdist.backends.availability import Availability
from dualdist.doctor.facts import InstallationFacts
from dualdist.environments.env_values import get_value
from dualdist.rendezvous.backend_selection import BACKEND, TRANSPORT
from dualdist.topology import Topology


@dataclass(frozen=True)
class DoctorContext:
    """A process, its host and its job. `topology` is None where the variables are broken.

    `ranks` of the job are on this host; `is_asked` says that somebody has named their number, who means to start them.
    """

    facts: InstallationFacts
    environ: Mapping[str, str]
    topology: Topology | None
    backends: Mapping[str, Availability]
    ranks: int
    is_asked: bool

    @property
    def asked(self) -> str | None:
        """The backend that was asked for."""
        return get_value(self.environ, BACKEND)

    @property
    def launcher(self) -> str:
        return "none" if self.topology is None else self.topology.launcher

    @property
    def is_started(self) -> bool:
        """Whether a launcher has started this process as one of several."""
        return self.topology is not None and self.topology.size > 1

    @property
    def is_spread(self) -> bool:
        """Whether the job is on several hosts for all that is known."""
        return self.topology is not None and self.topology.num_nodes > 1

    @property
    def wants_mpi(self) -> bool:
        return "mpi" in (self.asked, get_value(self.environ, TRANSPORT))

    @property
    def wants_horovod(self) -> bool:
        """Whether this job runs on Horovod, or not at all."""
        return self.asked == "horovod" or (self.asked in (None, "auto") and self.launcher == "horovodrun")

    def pip(self, *words: str) -> tuple[str, ...]:
        """The command line that has pip do this in this Python."""
        return (self.facts.python, "-m", "pip", *words)

    def ours(self, *words: str) -> tuple[str, ...]:
        """The command line of one of our commands, by this Python."""
        return (self.facts.python, "-m", "dualdist", *words)

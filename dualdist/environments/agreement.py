"""Two sources that disagree are an error that shows both."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.variables import OVERRIDE, integer, present, shown
from dualdist.errors import TopologyError
from dualdist.topology import Topology


def require_agreement(environ: Mapping[str, str], found: Topology, rank_name: str, size_name: str) -> None:
    """Raise a TopologyError where either variable is set and says another rank or size than the topology."""
    names = (rank_name, size_name)
    for name, value in zip(names, (found.rank, found.size), strict=True):
        said = integer(environ, name)
        if said is not None and said != value:
            raise TopologyError(
                f"{shown(environ, names)}, but rank {found.rank} of {found.size} by {found.source}: both cannot be right; "
                f"`unset {' '.join(present(environ, names))}` in the job script if {found.launcher} starts the ranks, "
                f"or set {OVERRIDE} to decide"
            )

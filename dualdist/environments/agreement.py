"""Two sources that disagree are an error that shows both."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import OVERRIDE, Names, integer, present, shown
from dualdist.errors import TopologyError
from dualdist.topology import Topology


def require_agreement(environ: Mapping[str, str], found: Topology, other: Names) -> None:
    """Raise a TopologyError where the other variables are set and say another rank or size than the topology."""
    names = (other.rank, other.size)
    for name, value in zip(names, (found.rank, found.size), strict=True):
        said = integer(environ, name)
        if said is not None and said != value:
            raise TopologyError(
                f"{shown(environ, names)}, but {found.source} says rank {found.rank} of {found.size}: which is true? "
                f"`unset {' '.join(present(environ, names))}` if {found.launcher} starts the ranks, or set {OVERRIDE}"
            )

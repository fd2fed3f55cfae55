"""No launcher: a job of one rank."""

from __future__ import annotations

from collections.abc import Mapping

from dualdist.environments.env_values import EnvValues
from dualdist.environments.infer_topology import infer_topology
from dualdist.topology import Topology


def detect(environ: Mapping[str, str]) -> Topology:
    """Rank 0 of 1."""
    return infer_topology(EnvValues(rank=0, size=1, local_rank=0), launcher="none", source="no launcher's variables")

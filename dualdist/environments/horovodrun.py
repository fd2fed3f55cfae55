"""horovodrun --gloo. With --mpi it runs mpirun, and the ranks see mpirun's variables (openmpi.py, hydra.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dualdist.environments.env_values import LauncherVariables, integer, present, read, require
from dualdist.environments.infer_topology import topology
from dualdist.topology import Topology

NAMES = LauncherVariables(
    launcher="horovodrun",
    command="horovodrun -np N python script.py",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
)
CROSS = replace(NAMES, rank="HOROVOD_CROSS_RANK", size="HOROVOD_CROSS_SIZE", local_rank=None, local_size=None)
STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
PLACE = (*NAMES.given(), *CROSS.given())
# Set by its elastic driver, for which two names of one host are two hosts: local ranks are what the ranks find.
ELASTIC = "HOROVOD_ELASTIC"
ANYWHERE = replace(NAMES, local_rank=None, local_size=None)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place; the ranks meet at horovodrun's own store, whose address is not rank 0's."""
    if not present(environ, PLACE):
        return None
    require(environ, NAMES, (*PLACE, STORE_ADDRESS, STORE_PORT))
    integer(environ, STORE_PORT)
    # Note [cross rank]: it counts only the hosts that have this local rank, so on unequal hosts it is no node's index,
    # and no rank can see whether the others' hosts equal its own. So the node is inferred, on every rank alike.
    read(environ, CROSS)
    names = ANYWHERE if environ.get(ELASTIC) == "1" else NAMES
    source = f"{', '.join(PLACE)} (horovodrun)"
    return topology(read(environ, names), launcher="horovodrun", source=source, rendezvous="horovod", names=names)

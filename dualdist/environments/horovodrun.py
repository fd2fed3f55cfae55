"""horovodrun --gloo. With --mpi it runs mpirun, and the ranks see mpirun's variables (openmpi.py, hydra.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dualdist.environments.env_values import LauncherVariables, find_set, get_integer, read_values, require_all
from dualdist.environments.infer_topology import infer_topology
from dualdist.topology import Topology

VARIABLES = LauncherVariables(
    launcher="horovodrun",
    command="horovodrun -np N python script.py",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
)
CROSS = replace(VARIABLES, rank="HOROVOD_CROSS_RANK", size="HOROVOD_CROSS_SIZE", local_rank=None, local_size=None)
STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
PLACE = (*VARIABLES.given(), *CROSS.given())
# Set by its elastic driver, for which two names of one host are two hosts: local ranks are what the ranks find.
ELASTIC = "HOROVOD_ELASTIC"
ANYWHERE = replace(VARIABLES, local_rank=None, local_size=None)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place; the ranks meet at horovodrun's own store, whose address is not rank 0's."""
    if not find_set(environ, PLACE):
        return None
    require_all(environ, VARIABLES, (*PLACE, STORE_ADDRESS, STORE_PORT))
    get_integer(environ, STORE_PORT)
    # Note [cross rank]: it counts only the hosts that have this local rank, so on unequal hosts it is no node's index,
    # and no rank can see whether the others' hosts equal its own. So the node is inferred, on every rank alike.
    read_values(environ, CROSS)
    names = ANYWHERE if environ.get(ELASTIC) == "1" else VARIABLES
    source = f"{', '.join(PLACE)} (horovodrun)"
    return infer_topology(
        read_values(environ, names), launcher="horovodrun", source=source, rendezvous="horovod", names=names
    )

"""horovodrun --gloo. With --mpi it runs mpirun, whose variables mpi.py reads."""

from collections.abc import Mapping
from dataclasses import replace

from dualdist.environments.env_values import (
    LauncherVariables,
    find_present,
    get_integer,
    read_topology,
    read_values,
    require_all,
)
from dualdist.topology import Topology

VARIABLES = LauncherVariables(
    "horovodrun",
    "horovodrun -np N python script.py",
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
)
CROSS = replace(VARIABLES, rank="HOROVOD_CROSS_RANK", size="HOROVOD_CROSS_SIZE", local_rank=None, local_size=None)
STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
RANK_VARIABLES = (*VARIABLES.given(), *CROSS.given())
# Set by Horovod's elastic driver, which takes two names of one host for two hosts: its local ranks are not used.
ELASTIC = "HOROVOD_ELASTIC"
ELASTIC_VARIABLES = replace(VARIABLES, local_rank=None, local_size=None)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """Read horovodrun's variables; rendezvous is at horovodrun's own store, whose address is not rank 0's.

    Note [cross rank]: HOROVOD_CROSS_RANK counts only the hosts that have this local rank, so it is not the node's
    index if hosts have different numbers of ranks, which no rank can see. So all ranks infer the node.
    """
    if not find_present(environ, RANK_VARIABLES):
        return None
    require_all(environ, VARIABLES, (*RANK_VARIABLES, STORE_ADDRESS, STORE_PORT))
    get_integer(environ, STORE_PORT)
    read_values(environ, CROSS)
    variables = ELASTIC_VARIABLES if environ.get(ELASTIC) == "1" else VARIABLES
    return read_topology(environ, variables, address=None, rendezvous="horovod")

"""horovodrun --gloo. With --mpi it runs mpirun, and the ranks see what mpirun sets: dualdist.environments.openmpi, hydra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dualdist.environments.place import topology
from dualdist.environments.variables import Names, Told, integer, present, read, require
from dualdist.topology import Topology

NAMES = Names(
    rank="HOROVOD_RANK", size="HOROVOD_SIZE", local_rank="HOROVOD_LOCAL_RANK", local_size="HOROVOD_LOCAL_SIZE"
)
CROSS_RANK = "HOROVOD_CROSS_RANK"
CROSS_SIZE = "HOROVOD_CROSS_SIZE"
STORE = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
PLACE = (*NAMES.given(), CROSS_RANK, CROSS_SIZE)


def detect(environ: Mapping[str, str]) -> Topology | None:
    """The rank's place; the ranks meet at horovodrun's own store, which is not an address of rank 0."""
    if not present(environ, PLACE):
        return None
    require(environ, (*PLACE, *STORE), "horovodrun --gloo", "horovodrun -np N python script.py")
    integer(environ, STORE[1])
    cross = read(environ, Names(rank=CROSS_RANK, size=CROSS_SIZE))
    found = topology(
        read(environ, NAMES),
        launcher="horovodrun",
        source=f"{', '.join(PLACE)} (horovodrun)",
        meeting="horovod",
    )
    return _with_node(found, cross)


def _with_node(found: Topology, cross: Told) -> Topology:
    """Note [cross rank]: the cross rank counts only the hosts that have this local rank, so on hosts of unequal size it is
    no node's index, and no rank can see whether the others' hosts are equal to its own. It serves as a guess where the numbers
    fit; `node` stays inferred on every rank alike, because the ranks compare their hosts when they meet.
    """
    if "node" in found.inferred and cross.size * found.local_size == found.size:
        return replace(found, node=cross.rank, nodes=cross.size)
    return found

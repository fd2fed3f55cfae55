"""The wait budget: the time for which a program waits for an operation that it has just begun.

Note [wait budget]: a thread inside an MPI call spins, and so does one that moves tensors in shared memory while its
peers are in step. Without a core for it, it takes time from the program and, as the other rank spins too, from that
rank: then the program waits for a while before it continues computing. It must not wait without limit, since another
rank may need it elsewhere first (in SyncBatchNorm, with a bucket that is not full). Step of ResNet-18 over MPI relative
to DDP, 2 ranks on 2 cores, medians of two jobs: nonblocking 1.05, thread alone 0.93 and 0.96, thread after backward
0.88 and 0.87, with a wait budget 0.86 and 0.85, waiting without limit 0.86 and 0.86.
"""

from dualdist.utils.machine import machine_cores, usable_cores

WAIT_BUDGET_S = 0.02
# For the bytes of an operation a program waits longer.
BYTES_PER_S = 500e6


def wait_budget_s(local_size: int, threads: int) -> float:
    """Return the wait budget of this rank, 0 if it has a core beside those of its threads."""
    return budget_on(usable_cores(), machine_cores(), local_size, threads)


def budget_on(cores: int, cores_of_machine: int, local_size: int, threads: int) -> float:
    """Return the wait budget of a rank that may run on `cores`; ranks that may use all of a machine's share them."""
    per_rank = cores // local_size if cores == cores_of_machine else cores
    return 0.0 if per_rank > threads else WAIT_BUDGET_S

"""Reductions between hosts whose ranks share memory.

Note [several hosts]: a link between hosts carries each byte of an allreduce once per direction. The ranks of a host add
up a block of the tensor in shared memory, each one slice of it; the ranks of equal index reduce their slice over the
network; and the host shares the slices. Blocks follow each other through these three stages, so that the network is
busy while the host adds and copies. Where hosts have different numbers of ranks, the first rank of each carries all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import Backend
from dualdist.backends.operation import Operation, Stages
from dualdist.backends.shm.host import CACHE_LINE_BYTES, HostRanks

# The size of a slice of a block, and how many blocks are on the network at a time: Note [several hosts].
SLICE_BYTES = 1 << 20
BLOCKS_UNDER_WAY = 2


@dataclass(frozen=True)
class Block:
    """A block whose slices are on the network: Note [several hosts]."""

    values: torch.Tensor
    starts: Sequence[int]
    on_network: Operation[torch.Tensor] | None  # the reduction of this rank's slice, if it has one


@dataclass(frozen=True)
class HostSlices:
    """The ranks of this host, into how many slices they cut a block, and who carries this rank's slice elsewhere."""

    host: HostRanks
    slices: int
    peers: Backend | None  # the ranks of equal index of the other hosts; None if this rank carries no slice

    def allreduce_(self, flat: torch.Tensor, op: ReduceOp, name: str) -> Stages[torch.Tensor]:
        """Reduce block after block: Note [several hosts]."""
        host, under_way = self.host, deque[Block]()
        for block in flat.split(self.slices * SLICE_BYTES // flat.element_size()):
            starts = slice_starts(block.nbytes, self.slices, host.size)
            yield host.reduce_scatter_(block, starts, op)
            own = block.view(torch.uint8)[starts[host.index] : starts[host.index + 1]].view(block.dtype)
            on_network = self.peers.allreduce_(own, op, name) if self.peers is not None and len(own) else None
            under_way.append(Block(block, starts, on_network))
            if len(under_way) > BLOCKS_UNDER_WAY:
                yield from share_block(host, under_way.popleft())
        while under_way:
            yield from share_block(host, under_way.popleft())
        return flat


def share_block(host: HostRanks, block: Block) -> Stages[None]:
    """Wait until this rank's slice of a block has been reduced over the network, and share it with the host."""
    if block.on_network is not None:
        yield block.on_network
    yield host.share_(block.values, block.starts)


def slice_starts(nbytes: int, slices: int, size: int) -> list[int]:
    """Return where each rank's slice of a block begins, and where the last one ends; only `slices` ranks have one."""
    lines = -(-nbytes // CACHE_LINE_BYTES)
    starts = [min(nbytes, lines * rank // slices * CACHE_LINE_BYTES) for rank in range(slices)]
    return starts + [nbytes] * (size + 1 - slices)

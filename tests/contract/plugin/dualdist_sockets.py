"""A backend of another package, over TCP connections between all ranks, for CPU tensors; found by its entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import reduce
from multiprocessing.connection import Client, Connection, Listener

import torch

from dualdist.backends.arithmetic import ReduceOp
from dualdist.backends.base import Backend, InitContext, Store, filled, gathered
from dualdist.backends.control_plane import as_bytes
from dualdist.backends.operation import Operation
from dualdist.backends.registry import BackendSpec
from dualdist.errors import CLOSED, CollectiveTimeoutError, NotInitializedError, RankLostError

REDUCE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}


class SocketOperation(Operation[torch.Tensor]):
    """An operation in the backend's thread."""

    def __init__(self, future: Future[torch.Tensor]) -> None:
        self._future = future

    def advance(self, wait_s: float) -> bool:
        if not wait([self._future], wait_s).done:
            return False
        self.result = self._future.result()
        return True


class SocketBackend(Backend):
    """Moves tensors in the order of the calls, in one thread; every reduction is an allgather first."""

    name = "sockets"
    transport = "tcp"
    supported_reduce_dtypes = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))
    rank_order_devices = frozenset(("cpu",))

    def __init__(self, store: Store, key: str, ranks: Sequence[int], job_rank: int, timeout_s: float) -> None:
        self.ranks, self.size, self.timeout_s, self.is_open = tuple(ranks), len(ranks), timeout_s, True
        self.rank = self.ranks.index(job_rank) if job_rank in self.ranks else -1
        self._store, self._key, self._job_rank = store, key, job_rank
        self._peers: dict[int, Connection] = {}
        self._thread = ThreadPoolExecutor(1, "dualdist-sockets")
        if self.rank >= 0:
            self._connect()

    def _connect(self) -> None:
        with Listener(("127.0.0.1", 0), backlog=self.size) as listener:
            self._store.set(f"{self._key}/{self.rank}", str(listener.address[1]))
            for rank in range(self.rank):
                port = int(self._store.get(f"{self._key}/{rank}", self.timeout_s))
                self._peers[rank] = Client(("127.0.0.1", port))
                self._peers[rank].send(self.rank)
            for _ in range(self.rank + 1, self.size):
                connection = listener.accept()
                self._peers[connection.recv()] = connection

    def _exchange(self, outgoing: Sequence[torch.Tensor], timeout_s: float) -> list[torch.Tensor]:
        """Send outgoing[i] to each rank i; return the bytes that each sent. Of a pair the lower rank sends first."""
        received = [as_bytes(tensor).clone() for tensor in outgoing]
        try:
            for other, peer in sorted(self._peers.items()):
                for sends in (self.rank < other, self.rank > other):
                    if sends:
                        peer.send_bytes(as_bytes(outgoing[other]).numpy().tobytes())
                    elif not peer.poll(timeout_s):
                        raise CollectiveTimeoutError(f"not all ranks arrived within {timeout_s:g} s")
                    else:
                        received[other] = torch.tensor(bytearray(peer.recv_bytes()), dtype=torch.uint8)
        except (EOFError, OSError) as error:
            raise RankLostError("another rank ended or its connection broke") from error
        return received

    def _submit(
        self, outgoing: Sequence[torch.Tensor], finish: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> Operation[torch.Tensor]:
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        timeout_s = self.timeout_s
        return SocketOperation(self._thread.submit(lambda: finish(self._exchange(outgoing, timeout_s))))

    def allreduce_(
        self, buffer: torch.Tensor, op: ReduceOp, name: str, source: torch.Tensor | None = None
    ) -> Operation[torch.Tensor]:
        filled(buffer, source)

        def finish(received: list[torch.Tensor]) -> torch.Tensor:
            return buffer.copy_(reduce(REDUCE[op], [data.view(buffer.dtype).view(buffer.shape) for data in received]))

        return self._submit([buffer] * self.size, finish)

    def allgather(self, tensor: torch.Tensor, name: str, output: torch.Tensor | None = None) -> Operation[torch.Tensor]:
        target = gathered(tensor, self.size, output)

        def finish(received: list[torch.Tensor]) -> torch.Tensor:
            return target.copy_(torch.cat(received).view(tensor.dtype).view(target.shape))

        return self._submit([tensor] * self.size, finish)

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> Operation[torch.Tensor]:
        outgoing = [buffer if self.rank == root else buffer.new_empty(0)] * self.size

        def finish(received: list[torch.Tensor]) -> torch.Tensor:
            as_bytes(buffer).copy_(received[root])
            return buffer

        return self._submit(outgoing, finish)

    def alltoall(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], name: str
    ) -> Operation[torch.Tensor]:
        return self._submit(tensor.split(list(sent)), lambda blocks: torch.cat(blocks).view(tensor.dtype))

    def duplicate(self, key: str) -> SocketBackend:
        return self.subgroup(self.ranks, key)

    def subgroup(self, ranks: Sequence[int], key: str) -> SocketBackend:
        return SocketBackend(self._store, f"{self._key}/{key}", ranks, self._job_rank, self.timeout_s)

    def close(self) -> None:
        self.is_open = False
        self._thread.shutdown(wait=False)
        for peer in self._peers.values():
            peer.close()


def start(context: InitContext) -> SocketBackend:
    assert context.store is not None, "the tests have several ranks"
    ranks, rank = range(context.topology.size), context.topology.rank
    return SocketBackend(context.store, f"{context.key}/sockets", ranks, rank, context.timeout_s)


SPEC = BackendSpec("sockets", start, transports=("tcp",))

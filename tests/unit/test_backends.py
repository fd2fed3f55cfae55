"""Decisions and failures of backends, without ranks: what is left of a failed one, waits, dtypes, pieces."""

import contextlib
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch

from dualdist.backends import registry
from dualdist.backends.arithmetic import ReduceOp, reduce_rows
from dualdist.backends.base import Backend
from dualdist.backends.horovod.backend import ProcessSets
from dualdist.backends.mpi import backend
from dualdist.backends.mpi.backend import split_calls
from dualdist.backends.native.host_slices import slice_starts
from dualdist.backends.operation import Operation
from dualdist.backends.single import SingleBackend
from dualdist.backends.wait_budget import WAIT_BUDGET_S, wait_budget_s
from dualdist.collectives.reductions import allreduce_
from dualdist.errors import CollectiveTimeoutError, RankLostError, UnsupportedError, UsageError
from dualdist.rendezvous.connect import connect_ranks
from dualdist.rendezvous.rank_assignment import RankLocation
from dualdist.rendezvous.records import Connected, RendezvousStore, Request
from dualdist.session import _start
from dualdist.topology import Topology
from dualdist.utils import machine

CONFIG = Request(Topology(0, 1, 0, 1, 0, 1, "none", "the test"), {}, "", "key", 5.0, RendezvousStore())


class NoLines(SingleBackend):
    """A backend that runs, and whose ranks do not find each other again."""

    def duplicate(self, key: str) -> Backend:
        raise CollectiveTimeoutError("not all ranks arrived")


def test_a_session_that_cannot_be_opened_closes_its_backend() -> None:
    backend = NoLines()
    with pytest.raises(CollectiveTimeoutError, match="not all ranks arrived"):
        _start(Connected(backend, CONFIG.topology, [RankLocation(0, 0)], None, CONFIG.key), CONFIG)
    assert not backend.is_open
    backend = SingleBackend()
    registry.register("renamed", lambda context: backend, ("none",))
    with pytest.raises(UsageError, match="'renamed' names itself 'single'"):
        connect_ranks("renamed", CONFIG, print)
    assert not backend.is_open
    registry._registered().pop("renamed")


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1000, 1 << 20, (1 << 20) + 8])
@pytest.mark.parametrize(("slices", "size"), [(1, 1), (1, 3), (2, 2), (3, 3), (8, 8)])
def test_slices_cover_a_block_and_begin_on_cache_lines(nbytes: int, slices: int, size: int) -> None:
    starts = slice_starts(nbytes, slices, size)
    assert len(starts) == size + 1
    assert (starts[0], starts[-1]) == (0, nbytes)
    assert starts == sorted(starts)
    assert all(start % 64 == 0 or start == nbytes for start in starts)
    assert starts[slices:] == [nbytes] * (size + 1 - slices), "the other ranks have none"


def test_a_horovod_group_ends_though_a_rank_does_not_leave_and_a_failed_one_has_no_users() -> None:
    may_end = threading.Event()
    engine = SimpleNamespace(size=lambda: 3, add_process_set=tuple, remove_process_set=lambda found: may_end.wait())
    sets = ProcessSets(cast(ModuleType, engine), contextlib.nullcontext)
    for ranks in ((0, 1), (1, 2)):
        assert sets.acquire(ranks) == ranks
    with pytest.raises(RankLostError, match=r"group of ranks \[0, 1\] within 0.05 s: another rank does not answer"):
        sets.release((0, 1), 0.05)
    sets.release((1, 2), 30.0)  # knows better than to wait
    may_end.set()
    removed: list[object] = []
    add = mock.Mock(side_effect=[ValueError("not dynamic"), (0, 1)])
    engine = SimpleNamespace(size=lambda: 3, add_process_set=add, remove_process_set=removed.append)
    sets = ProcessSets(cast(ModuleType, engine), contextlib.nullcontext)
    with pytest.raises(UnsupportedError, match="not dynamic"):
        sets.acquire((0, 1))
    sets.acquire((0, 1))
    sets.release((0, 1), 5.0)
    assert removed == [(0, 1)], "its only user has left"


@pytest.mark.parametrize(
    ("cores", "everywhere", "local_size", "threads", "expected"),
    [
        (2, 2, 2, 1, WAIT_BUDGET_S),
        (2, 2, 4, 1, WAIT_BUDGET_S),
        (64, 64, 4, 16, WAIT_BUDGET_S),
        (64, 64, 4, 15, 0.0),
        (1, 64, 64, 1, WAIT_BUDGET_S),
        (8, 64, 8, 7, 0.0),
        (64, 64, 1, 64, WAIT_BUDGET_S),
        (32, 64, 8, 8, WAIT_BUDGET_S),  # four ranks are bound to each of two sockets
    ],
)
def test_a_program_waits_for_the_thread_unless_it_has_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, everywhere: int, local_size: int, threads: int, expected: float
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(machine, "machine_cores", lambda: everywhere)
    assert wait_budget_s(local_size, threads) == expected


@pytest.mark.parametrize("count", [0, 1, 24, 25, 26, 1000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_pieces_are_countable_and_together_the_tensor(
    monkeypatch: pytest.MonkeyPatch, count: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(backend, "MAX_COUNT", 101)
    tensor = torch.arange(count).to(dtype).view(-1, 1)
    pieces = split_calls(tensor)
    assert all(0 < piece.nbytes <= 101 for piece in pieces)
    assert torch.equal(torch.cat([tensor.new_empty(0), *(piece.view(-1) for piece in pieces)]), tensor.view(-1))
    assert all(piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for piece in pieces)


def result_of(operation: Operation[torch.Tensor]) -> torch.Tensor:
    assert operation.advance(0.0)
    return operation.result


class Crowd(SingleBackend):
    """A backend of many ranks with equal values, whose transport supports only bytes and 32-bit numbers."""

    supported_reduce_dtypes = frozenset((torch.uint8, torch.int32, torch.float32))

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def allreduce_(self, buffer, op, name, source=None):  # type: ignore[no-untyped-def]
        if op in ("sum", "product"):
            buffer.copy_(buffer * self.size if op == "sum" else buffer**self.size)
        return super().allreduce_(buffer, op, name)


@pytest.mark.parametrize("size", [2, 255, 256, 512])
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
def test_reductions_of_equal_booleans_do_not_overflow(op: ReduceOp, size: int) -> None:
    mine = torch.tensor([True, False])
    assert reduce_rows(mine.repeat(size, 1), op).tolist() == [True, False]
    assert result_of(allreduce_(Crowd(size), mine, op, "test")).tolist() == [True, False]


FAULT = """
import ctypes, sys, threading, time
from types import SimpleNamespace
from dualdist.backends.mpi.world import end_beside_calls
if sys.argv[1:]:
    end_beside_calls(60, SimpleNamespace())
threading.Thread(target=ctypes.CDLL(None).strlen, args=(ctypes.c_void_p(8),), daemon=True).start()
time.sleep(0.5)
"""


@pytest.mark.parametrize(("words", "status"), [([], -11), (["stopped"], 0)])
def test_a_thread_that_is_left_in_mpi_does_not_end_the_process(words: list[str], status: int) -> None:
    """It faults, as where MPI_Finalize has unmapped what it polls."""
    assert subprocess.run([sys.executable, "-c", FAULT, *words], check=False).returncode == status

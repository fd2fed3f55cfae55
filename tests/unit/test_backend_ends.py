"""What is left of a backend when something failed, and who waits for whom at its end."""

from __future__ import annotations

import contextlib
import threading
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch.distributed as dist

from dualdist.backends.base import Backend
from dualdist.backends.horovod.backend import ProcessSets
from dualdist.backends.native.backend import NativeBackend
from dualdist.backends.native.store import TcpStore
from dualdist.backends.shm.channel import HostChannel, channel_bytes
from dualdist.backends.shm.segment import open_segment
from dualdist.backends.single import SingleBackend
from dualdist.errors import CollectiveTimeoutError, RankLostError, UnsupportedError
from dualdist.rendezvous.open_session import RendezvousStore, SessionConfig, _start_session
from dualdist.rendezvous.rank_assignment import RankLocation
from dualdist.topology import Topology
from dualdist.utils.deadline import Deadline


class NoLines(SingleBackend):
    """A backend that runs, and whose ranks do not find each other again."""

    def channel(self, key: str) -> Backend:
        raise CollectiveTimeoutError("not all ranks arrived")


def test_a_session_that_cannot_be_opened_ends_the_backend() -> None:
    alone = Topology(
        rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, launcher="none", source="the test"
    )
    backend = NoLines()
    with pytest.raises(CollectiveTimeoutError, match="not all ranks arrived"):
        _start_session(backend, None, SessionConfig(alone, {}, "", "key", 5.0, RendezvousStore()), [RankLocation(0, 0)])
    assert not backend.is_open


def test_the_leaders_of_hosts_wait_as_long_as_everybody() -> None:
    store = dist.HashStore()
    segment = open_segment(TcpStore(store, "", "the test"), "key", 0, 1, channel_bytes(1), Deadline(5.0))  # type: ignore[arg-type]
    leaders = SingleBackend()
    native = NativeBackend(dict, [0], 0, store, contextlib.nullcontext, 5.0, owned=False, on_gpu=False)
    native._host = HostChannel(segment, [0], leaders, 5.0, is_only_host=False)
    native.timeout_s = 77.0
    assert (native._host.peers.timeout_s, leaders.timeout_s, native.timeout_s) == (77.0, 77.0, 77.0)


def test_a_horovod_group_that_another_rank_does_not_leave_holds_nobody_up() -> None:
    may_end = threading.Event()
    engine = SimpleNamespace(size=lambda: 3, add_process_set=tuple, remove_process_set=lambda found: may_end.wait())
    sets = ProcessSets(cast(ModuleType, engine), contextlib.nullcontext)
    for ranks in ((0, 1), (1, 2)):
        assert sets.acquire(ranks) == ranks
    with pytest.raises(RankLostError, match=r"group of ranks \[0, 1\] within 0.05 s: another rank does not answer"):
        sets.release((0, 1), 0.05)
    sets.release((1, 2), 30.0)  # knows better than to wait
    may_end.set()


def test_a_horovod_group_that_could_not_be_made_has_no_users() -> None:
    answers = iter([ValueError("not dynamic"), (0, 1)])
    removed = []

    def add(ranks: list[int]) -> object:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    engine = SimpleNamespace(size=lambda: 3, add_process_set=add, remove_process_set=removed.append)
    sets = ProcessSets(cast(ModuleType, engine), contextlib.nullcontext)
    with pytest.raises(UnsupportedError, match="not dynamic"):
        sets.acquire((0, 1))
    sets.acquire((0, 1))
    sets.release((0, 1), 5.0)
    assert removed == [(0, 1)], "its only user has left"

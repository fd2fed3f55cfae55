"""Rounds at a store that outlives the ranks, by ranks that are threads and a real store."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dualdist.backends.native.store import TcpStore
from dualdist.errors import RendezvousError
from dualdist.rendezvous import store_rendezvous
from dualdist.topology import Topology
from dualdist.utils.deadline import Deadline


def store() -> TcpStore:
    return TcpStore(dist.HashStore(), "", "the test's store")


def place(rank: int, size: int, nodes: int = 1) -> Topology:
    return Topology(rank, size, rank, size, 0, nodes, "torchrun", "X", rendezvous="agent")


def rounds(found: TcpStore, came: Sequence[int], size: int, timeout_s: float = 20) -> list[object]:
    """What the ranks that came agree on, or the error of each."""

    def attend(rank: int) -> object:
        time.sleep(random.uniform(0, 0.05))
        try:
            return store_rendezvous.agree_on_generation(found, place(rank, size), Deadline(timeout_s))
        except RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(len(came)) as pool:
        return list(pool.map(attend, came))


def test_each_round_has_a_number_of_its_own_whatever_an_earlier_one_left() -> None:
    """Rounds of other sizes follow each other, and some of them never came to an end."""
    shared, seen = store(), set()
    for size, came in ((3, [0, 1, 2]), (3, [1, 2]), (2, [0, 1]), (4, [0, 2]), (1, [0]), (3, [0, 1, 2]), (3, [2, 1, 0])):
        whole = len(came) == size
        found = rounds(shared, came, size, 20 if whole else 0.2)
        if whole:
            (number,) = {*found}
            assert number not in seen
            seen.add(number)
        else:  # rank 0 may have answered those who came before it gave up
            waited = ["waited 0.2 s" in str(each) for each in found]
            assert waited[came.index(0)] if 0 in came else all(waited), found


def test_who_did_not_come_is_told() -> None:
    assert rounds(store(), [0, 1], 4, 0.3)[0] == (
        "rank 0 waited 0.3 s for all 4 ranks to call dd.init(); 2 of them did not"
    )
    assert rounds(store(), [1], 2, 0.3) == [
        "rank 1 waited 0.3 s for rank 0 to call dd.init(): see what it printed last"
    ]


@pytest.mark.parametrize(
    ("environ", "nodes", "repeats"),
    [({}, 1, False), ({"TORCHELASTIC_MAX_RESTARTS": "0"}, 1, False), ({"TORCHELASTIC_MAX_RESTARTS": "3"}, 1, True),
     ({"TORCHELASTIC_MAX_RESTARTS": "0"}, 2, True)],
)  # fmt: skip
def test_a_job_that_cannot_have_rounds_asks_nothing(environ: dict[str, str], nodes: int, repeats: bool) -> None:
    size = 2 * nodes
    there = Topology(0, size, 0, 2, 0, nodes, "torchrun", "X", rendezvous="agent")
    assert store_rendezvous.may_restart(there, environ) is repeats
    assert not store_rendezvous.may_restart(Topology(0, size, 0, 2, 0, nodes, "torchrun", "X"), environ)

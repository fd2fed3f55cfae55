"""Rendezvous: locations from reports, ranks that meet over a store (one thread each) or a file, elastic generations."""

import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from dualdist.backends.native.store import TcpStore
from dualdist.environments.env_values import get_main_address
from dualdist.errors import DualdistError, RendezvousError, TopologyError, UsageError
from dualdist.rendezvous import store_rendezvous
from dualdist.rendezvous.address_exchange import FileAddressExchange
from dualdist.rendezvous.meeting import LocationExchange, address_of_rank_0, interface_between_nodes
from dualdist.rendezvous.rank_assignment import RankLocation, RankReport, assign_locations, make_report, with_location
from dualdist.rendezvous.records import RendezvousStore, Request
from dualdist.rendezvous.store_rendezvous import join_store
from dualdist.topology import Topology
from dualdist.utils.deadline import Deadline
from dualdist.utils.network_interfaces import (
    IPV6_INTERFACES,
    LOOPBACK,
    StoreAddress,
    format_endpoint,
    host_identity,
    interface_towards,
    open_listener,
    resolve_address,
)


def store(address: str = "") -> TcpStore:
    return TcpStore(dist.HashStore(), address, "the test's store")


def report(rank: int, size: int, backend: str = "native") -> RankReport:
    return RankReport(rank, size, "host", None, None, backend)


@pytest.mark.parametrize(
    ("came", "kind", "words"),
    [
        ([(0, 3), (2, 3)], RendezvousError, "missing: \\[1]"),
        ([(0, 2), (1, 4)], TopologyError, "of (2 met .* of 4|4 met .* of 2)"),
    ],
    ids=["one is missing", "two sizes"],
)
def test_who_came_learns_what_is_wrong(came: list[tuple[int, int]], kind: type[DualdistError], words: str) -> None:
    """faults/test_bad_input.py has a rank that comes twice."""
    shared = store()

    def attend(who: tuple[int, int]) -> None:
        with pytest.raises(kind, match=words):
            LocationExchange(shared, report(*who), "key", Deadline(2)).run()

    with ThreadPoolExecutor(len(came)) as pool:
        list(pool.map(attend, came))


def test_rank_0_serves_its_store_until_a_slow_rank_has_read_why_rendezvous_failed() -> None:
    read = threading.Event()

    class SlowClient(TcpStore):
        def get(self, key: str, timeout_s: float) -> str:
            value = super().get(key, timeout_s)
            if key.endswith("verdict"):
                time.sleep(0.5)
                read.set()
            return value

    quick = store()
    clients = [(quick, "native"), (SlowClient(quick.store, "", "the test's store"), "horovod")]

    def attend(rank: int) -> bool:
        client, backend = clients[rank]
        with pytest.raises(TopologyError, match="'horovod'"):
            LocationExchange(client, report(rank, 2, backend), "key", Deadline(30)).run()
        return read.is_set()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(attend, range(2))) == [True, True]


def join(rank: int, size: int, url: str, timeout_s: float = 60) -> tuple[object, str, list[RankLocation], str | None]:
    topology = Topology(rank, size, rank, size, 0, 1, "override", "X")
    environ = {"DUALDIST_RENDEZVOUS": url}
    return join_store(Request(topology, environ, "", "session", timeout_s, RendezvousStore()), "native")


def test_ranks_meet_by_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:  # the results keep the store, which rank 0 serves
        found = list(pool.map(lambda rank: join(rank, 3, (tmp_path / "meet").as_uri()), range(3)))
    assert [met[2:] for met in found] == [([RankLocation(0, 0), RankLocation(0, 1), RankLocation(0, 2)], None)] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_file_left_over_from_a_dead_job_is_waited_out(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    with open_listener(0, loopback_only=True) as gone:
        stale = StoreAddress(host_identity({}), (), gone.getsockname()[1])
    FileAddressExchange(path).publish(stale.dumps())
    started = threading.Event()

    def attend(rank: int) -> object:
        if rank == 0:
            started.wait(30)
        started.set()
        return join(rank, 2, path.as_uri())

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(attend, range(2)))
    assert len(found) == 2


def test_a_file_that_cannot_be_read_to_its_end_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    os.mkfifo(path)  # blocks its reader, as a shared folder that hangs
    with pytest.raises(RendezvousError, match=r"rank 1 waited 0.2 s for the network or the shared folder .*meet"):
        join(1, 2, path.as_uri(), 0.2)
    path.write_text("")  # lets the reader end
    with pytest.raises(RendezvousError, match=r"rank 0 cannot write .*no-such-folder"):
        join(0, 2, (tmp_path / "no-such-folder" / "meet").as_uri())


@pytest.mark.parametrize(
    "url", ["meet", "http://host/x", "file://host/x", "file:relative", "tcp://host", "tcp://host:x", "tcp://h:99999"]
)
def test_a_wrong_rendezvous_is_refused_by_name(url: str) -> None:
    with pytest.raises(UsageError, match="DUALDIST_RENDEZVOUS"):
        join(1, 2, url, timeout_s=1)


@pytest.mark.parametrize("given", ["::1", "[::1]"])
def test_an_address_of_ipv6_may_stand_in_brackets(given: str) -> None:
    main = get_main_address({"MASTER_ADDR": given, "MASTER_PORT": "29400"})
    assert main is not None
    assert (main.address, main.is_loopback, format_endpoint(main.address, main.port)) == ("::1", True, "[::1]:29400")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_on_two_nodes_find_their_interfaces_by_either_kind_of_address(address: str) -> None:
    shared = store(address)
    places = [RankLocation(0, 0), RankLocation(1, 0)]
    listed = Path(IPV6_INTERFACES)
    has_ipv6 = listed.exists() and "lo" in listed.read_text().split()
    expected = "lo" if address == LOOPBACK or has_ipv6 else None
    reached = {rank: address_of_rank_0(shared, places, rank, "key", Deadline(5)) for rank in (1, 0)}
    assert [interface_between_nodes(reached[rank], places, rank) for rank in (1, 0)] == [expected] * 2
    assert shared.get("key/reached", 5) == address


def test_a_name_without_an_address_is_an_error_of_ours() -> None:
    assert resolve_address("localhost") == LOOPBACK
    with pytest.raises(RendezvousError, match="::1%none has no address"):
        resolve_address("::1%none")
    assert interface_towards("::1%none") is None


def reports(*said: tuple[str, int | None, int | None]) -> list[RankReport]:
    """One report a rank, of (host, node, local rank)."""
    return [RankReport(rank, len(said), *each, "native") for rank, each in enumerate(said)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([("a", 0, 0), ("a", 0, 1)], [(0, 0, 0), (0, 1, 0)]),
        ([("a", None, None), ("a", None, None)], [(0, 0, 0), (0, 1, 0)]),
        ([("a", None, 0), ("b", None, 0)], [(0, 0, 0), (1, 0, 1)]),
        ([("a", None, 0), ("b", None, 0), ("a", None, 1)], [(0, 0, 0), (1, 0, 1), (0, 1, 0)]),
        ([("a", 0, 0), ("a", 1, 0)], [(0, 0, 0), (1, 0, 0)]),
        ([("a", 1, 0), ("b", 0, 0)], [(1, 0, 0), (0, 0, 1)]),
        ([("a", None, 0), *[("b", None, n) for n in range(3)]], [(0, 0, 0), (1, 0, 1), (1, 1, 1), (1, 2, 1)]),
        ([("a", None, 1), ("a", None, 0)], [(0, 1, 0), (0, 0, 0)]),
    ],
    ids=["all given", "none, one host", "a node is a host", "round robin", "two nodes on one machine, as given",
         "nodes need not follow the ranks", "1+3", "local ranks as given"],
)  # fmt: skip
def test_every_rank_gets_its_location(
    said: list[tuple[str, int | None, int | None]], expected: list[tuple[int, int, int]]
) -> None:
    assert assign_locations(reports(*said)) == [RankLocation(*place) for place in expected]


ALONE, (FIRST, SECOND) = reports(("a", 0, 0)), reports(("a", 0, 0), ("a", 0, 1))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([replace(ALONE[0], size=4)], ["1 ranks met", "rank 0 of 4"]),
        (reports(("a", 0, 0), ("a", 0, 0)), ["[0, 1]", "[0, 0]", "LOCAL_RANK"]),
        (reports(("a", None, 0), ("a", None, 2)), ["[0, 2]"]),
        ([FIRST, replace(SECOND, backend="horovod")], ["'native'", "'horovod'"]),
        ([FIRST, replace(SECOND, transport="gloo")], ["''", "'gloo'", "DUALDIST_TRANSPORT"]),
    ],
    ids=["another size", "a local rank twice", "a local rank missing", "two backends", "two transports"],
)
def test_contradictions_are_named(wrong: list[RankReport], words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        assign_locations(wrong)
    assert [word for word in words if word not in str(caught.value)] == []


def test_inferred_fields_are_replaced_and_given_ones_are_checked() -> None:
    told = Topology(1, 2, 0, 1, 1, 2, "mpirun", "X", inferred=frozenset({"node_rank", "num_nodes"}))
    assert make_report(told, "a", "native").node_rank is None
    assert make_report(told, "a", "native").local_rank == 0
    found = with_location(replace(told, local_rank=1, local_size=2), [RankLocation(0, 0), RankLocation(0, 1)])
    assert (found.node_rank, found.num_nodes, found.local_rank, found.local_size) == (0, 1, 1, 2)
    assert not found.inferred
    with pytest.raises(TopologyError, match=r"local_size=1 .*make it 2"):
        with_location(told, [RankLocation(0, 1), RankLocation(0, 0)])


def generations(found: TcpStore, came: Sequence[int], size: int, timeout_s: float = 20) -> list[object]:
    def attend(rank: int) -> object:
        time.sleep(random.uniform(0, 0.05))
        try:
            topology = Topology(rank, size, rank, size, 0, 1, "torchrun", "X", rendezvous="agent")
            return store_rendezvous.agree_on_generation(found, topology, Deadline(timeout_s))
        except RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(len(came)) as pool:
        return list(pool.map(attend, came))


def test_each_generation_has_another_number_and_missing_ranks_are_named() -> None:
    """Rounds of other sizes follow each other, and some of them never came to an end."""
    shared, seen = store(), set()
    for size, came in ((3, [0, 1, 2]), (3, [1, 2]), (2, [0, 1]), (4, [0, 2]), (1, [0]), (3, [0, 1, 2]), (3, [2, 1, 0])):
        whole = len(came) == size
        found = generations(shared, came, size, 20 if whole else 0.2)
        if whole:
            (number,) = {*found}
            assert number not in seen
            seen.add(number)
        else:  # rank 0 may have answered those who came before it gave up
            waited = ["waited 0.2 s" in str(each) for each in found]
            assert waited[came.index(0)] if 0 in came else all(waited), found
    expected = "rank 0 waited 0.3 s for all 4 ranks to call dd.init(); 2 of them did not"
    assert generations(store(), [0, 1], 4, 0.3)[0] == expected
    expected = "rank 1 waited 0.3 s for rank 0 to call dd.init(): see what it printed last"
    assert generations(store(), [1], 2, 0.3) == [expected]


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

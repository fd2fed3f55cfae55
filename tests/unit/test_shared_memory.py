"""Memory without a name, processes that are noticed when they end, and messages that are not mixed up."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dualdist.backends.base import Epilogue
from dualdist.backends.native.store import TcpStore
from dualdist.backends.shm.channel import STAGE_BYTES, HostChannel, channel_bytes
from dualdist.backends.shm.segment import SegmentPeers, ShmMessage, open_exchange, open_segment, unavailable_reason
from dualdist.errors import BackendUnavailableError, CollectiveTimeoutError, RankLostError
from dualdist.utils.deadline import Deadline

FOLDER = Path("/dev/shm")
TIMEOUT_S = 30.0
Body = Callable[[TcpStore, int, int], Any]  # of a rank: store, place, size
InProcesses = Callable[[int, Body], list[Any]]


@pytest.fixture(scope="module")
def in_processes() -> Iterator[InProcesses]:
    """Run a body in each of several processes that share a store, and return what it returned in each."""
    with multiprocessing.get_context("spawn").Pool(4) as pool:

        def run(size: int, body: Body) -> list[Any]:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            places = [(body, server.port, place, size) for place in range(size)]
            return pool.starmap_async(call, places, chunksize=1).get(3 * TIMEOUT_S)

        yield run


def call(body: Body, port: int, place: int, size: int) -> Any:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.add("came", 1)
    while store.add("came", 0) < size:
        time.sleep(0.01)  # an idle worker of the pool would take two ranks
    return body(TcpStore(store, "127.0.0.1", "the test"), place, size)


def write_and_read(store: TcpStore, place: int, size: int) -> bytes:
    segment = open_segment(store, "key", place, size, 1 << 16, Deadline(TIMEOUT_S))
    view = segment.map(0, 1 << 16)
    view[place] = 7 + place
    deadline = Deadline(TIMEOUT_S)
    while 0 in view[:size] and not deadline.passed():
        time.sleep(0.01)
    return bytes(view[:size])


def test_what_one_writes_the_others_read(in_processes: InProcesses) -> None:
    assert in_processes(3, write_and_read) == [bytes([7, 8, 9])] * 3


def test_too_little_room_is_said_with_what_to_type(tmp_path: Path) -> None:
    assert unavailable_reason(1 << 10, str(tmp_path)) == ""
    assert "--shm-size" in unavailable_reason(1 << 60, str(tmp_path))
    assert "No such file" in unavailable_reason(1, str(tmp_path / "missing"))


def attach_to_too_much(store: TcpStore, place: int, size: int) -> str:
    with pytest.raises(BackendUnavailableError) as caught:
        open_segment(store, "key", place, size, 1 << 60, Deadline(TIMEOUT_S))
    return str(caught.value)


def test_all_ranks_hear_that_there_is_no_room(in_processes: InProcesses) -> None:
    first, second = in_processes(2, attach_to_too_much)
    assert first == second
    assert str(FOLDER) in first


def hold(port: int, pipe: Connection) -> None:
    """A second process: attaches, forks a child that outlives it, and waits to be killed."""
    store = TcpStore(dist.TCPStore("127.0.0.1", port, is_master=False), "127.0.0.1", "the test")
    segment = open_segment(store, "key", 1, 2, 1 << 12, Deadline(TIMEOUT_S))
    child = os.fork()
    if child == 0:
        time.sleep(TIMEOUT_S)
        os._exit(0)
    pipe.send(child)
    time.sleep(TIMEOUT_S)
    segment.leave()


def test_a_killed_process_is_noticed_though_its_child_lives() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=hold, args=(server.port, there))
    other.start()
    try:
        store = TcpStore(server, "127.0.0.1", "the test")
        segment = open_segment(store, "key", 0, 2, 1 << 12, Deadline(TIMEOUT_S))
        child = here.recv()
        assert segment.is_alive(1)
        neighbours = SegmentPeers(segment, (4, 5), TIMEOUT_S)
        other.kill()
        with pytest.raises(RankLostError, match="rank 5"):
            neighbours.wait(lambda: False)
        assert segment.is_alive(0)
        os.kill(child, signal.SIGKILL)
    finally:
        other.kill()
        other.join()


def test_a_wait_ends() -> None:
    store = TcpStore(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "", "the test")
    segment = open_segment(store, "key", 0, 1, 1 << 12, Deadline(TIMEOUT_S))
    with pytest.raises(CollectiveTimeoutError, match=r"0\.5 s"):
        SegmentPeers(segment, [0], 0.5).wait(lambda: False)


def talk(store: TcpStore, place: int, size: int) -> list[list[bytes]]:
    mailbox = open_exchange(store, "key", range(size), place, Deadline(TIMEOUT_S))
    chance, heard = random.Random(place), []
    for number in range(200):
        payload = b"%d.%d:" % (place, number) + b"x" * chance.choice([0, 3, 900, 1010, 1011, 1012, 1013, 5000])
        heard.append([said.split(b":")[0] + b"%d" % len(said) for said in ShmMessage(mailbox, payload).wait()])
    return heard


@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_any_length_keep_their_order(in_processes: InProcesses, size: int) -> None:
    heard = in_processes(size, talk)
    assert all(mine == heard[0] for mine in heard)
    for number, said in enumerate(heard[0]):
        assert [text.startswith(b"%d.%d" % (place, number)) for place, text in enumerate(said)] == [True] * size


def compare(store: TcpStore, place: int, size: int) -> list[bool]:
    mailbox = open_exchange(store, "key", range(size), place, Deadline(TIMEOUT_S))
    said = [(b"same", b"same"), (b"same", b"some"), (b"short", b"shorter"), (b"x" * 2000, b"x" * 2000)]
    found = []
    for pair in said:
        letters = ShmMessage(mailbox, pair[place])
        found.append(letters.all_equal())
        letters.wait()
    return found


def test_alike_is_told_apart_from_different(in_processes: InProcesses) -> None:
    assert in_processes(2, compare) == [[True, False, False, False]] * 2, "long messages are read, and not known to be"


def operate(store: TcpStore, place: int, size: int) -> None:
    segment = open_segment(store, "key", place, size, channel_bytes(size), Deadline(TIMEOUT_S))
    line = HostChannel(segment, range(size), None, TIMEOUT_S, is_only_host=True)
    most = 3 * STAGE_BYTES // 8
    chance = random.Random(0)
    for number in range(120):
        count = chance.choice([1, 7, 2000, most // 5, most])
        kind = chance.choice(["sum", "max", "gather", "broadcast", "two"])
        if place == chance.randrange(size):
            time.sleep(0.002)
        before = torch.arange(count, dtype=torch.float64) + number
        mine, again, total = before + place, before + place, before * size + size * (size - 1) / 2
        if kind == "gather":
            pairs = [(line.allgather(mine), torch.cat([before + other for other in range(size)]))]
        elif kind == "broadcast":
            pairs = [(line.broadcast_(mine, size - 1), before + size - 1)]
        elif kind == "max":
            pairs = [(line.allreduce_(mine, "max", "x"), before + size - 1)]
        else:
            works = [line.allreduce_(each, "sum", "x") for each in (mine, again)[: 1 + (kind == "two")]]
            pairs = [(work, total) for work in works]
        for work, expected in pairs:
            assert torch.equal(work.wait(), expected), (number, kind, count)


@pytest.mark.parametrize("size", [2, 3])
def test_operations_of_every_size_in_any_order_keep_their_values(in_processes: InProcesses, size: int) -> None:
    """Small ones and large ones take turns on the same stages: nothing may be written over before all have read it."""
    in_processes(size, operate)


def reduce_buffers(count: int, store: TcpStore, place: int, size: int) -> int:
    segment = open_segment(store, "key", place, size, channel_bytes(size), Deadline(TIMEOUT_S))
    line = HostChannel(segment, range(size), None, TIMEOUT_S, is_only_host=True)
    buffers, places = [], []
    for _ in range(3):
        places.append(line.reserve(4 * count)[0])
        buffer = line.buffer(places[-1], 0, count, torch.float32)
        buffers.append(buffer)
    half = count // 2
    for number in range(20):
        works = []
        for buffer in buffers:
            buffer.values.copy_(torch.arange(count) % 97 + place + number)
            works.append(buffer.allreduce("sum", "x", Epilogue(half, lambda piece: piece.mul_(2))))
        if place == number % size:
            time.sleep(0.002)  # the others must wait for this rank's part of the result
        expected = (torch.arange(count) % 97 + number) * size + size * (size - 1) // 2
        expected[:half] *= 2
        for work in works:
            assert torch.equal(work.wait(), expected.float()), number
    used = os.fstat(segment._memory).st_blocks
    kept = buffers[0].values
    for start in places:
        line.release(start)
    del buffers, buffer, works, work
    for _ in range(2):  # all say that nobody looks at theirs, then it is given back
        line.reserve(4096)
        line.allgather(torch.zeros(1)).wait()
    assert torch.equal(kept, expected.float()), "what somebody looks at stays"
    return 512 * (used - os.fstat(segment._memory).st_blocks)


def test_buffers_are_reduced_side_by_side_and_given_back(in_processes: InProcesses) -> None:
    size, count = 3, 100_000
    freed = in_processes(size, partial(reduce_buffers, count))
    assert min(freed) > 1.5 * size * 4 * count, "the leader gives back the two that nobody looks at"

"""Memory without a name, processes that are noticed when they end, and what all of them agree to use."""

import multiprocessing
import os
import resource
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

from dualdist.backends.native.backend import NativeBackend, NativeSettings
from dualdist.backends.native.store import TcpStore
from dualdist.backends.shm.host import HostRanks, connect_host, memory_bytes
from dualdist.backends.shm.segment import open_segment, unavailable_reason
from dualdist.errors import BackendUnavailableError, RendezvousError
from dualdist.utils import extension
from dualdist.utils.deadline import Deadline

FOLDER = Path("/dev/shm")
TIMEOUT_S = 30.0
SLOT_BYTES = 1 << 12
PAIR_BYTES = memory_bytes(2, SLOT_BYTES)
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


def attach_without_files(place: int, store: TcpStore, own: int, size: int) -> str:
    """Attach; the process of this place may open one file, a socket, but not those that it is sent."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if own == place:
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with pytest.raises(RendezvousError) as caught:
            open_segment(store, "key", own, size, PAIR_BYTES, Deadline(TIMEOUT_S))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return str(caught.value)


def test_a_process_that_may_open_no_more_files_says_so(in_processes: InProcesses) -> None:
    first, second = in_processes(2, partial(attach_without_files, 1))
    assert "a rank of this host ended" in first
    assert "Too many open files; allow more of them by ulimit -n" in second


def hold(port: int, pipe: Connection) -> None:
    """A second process: attaches, forks a child that outlives it, and waits to be killed."""
    store = TcpStore(dist.TCPStore("127.0.0.1", port, is_master=False), "127.0.0.1", "the test")
    segment = open_segment(store, "key", 1, 2, PAIR_BYTES, Deadline(TIMEOUT_S))
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
        segment = open_segment(store, "key", 0, 2, PAIR_BYTES, Deadline(TIMEOUT_S))
        child = here.recv()
        assert segment.is_alive(1)
        neighbours = HostRanks(segment, (4, 5), SLOT_BYTES)
        message = neighbours.message(b"", None)
        assert not message.advance(0.0)
        assert neighbours.lost_ranks() == []
        other.kill()
        other.join()
        assert neighbours.lost_ranks() == [5]
        assert segment.is_alive(0)
        os.kill(child, signal.SIGKILL)
    finally:
        other.kill()
        other.join()


def wait_in_vain(store: TcpStore, place: int, size: int) -> bool:
    host = connect_host(store, "key", range(size), place, SLOT_BYTES, Deadline(TIMEOUT_S))
    if place == 1:
        store.get("has waited", TIMEOUT_S)
        return False
    has_ended = host.broadcast_(torch.zeros(3), 0).advance(0.5)
    store.set("has waited", "")
    return has_ended


def test_a_wait_ends(in_processes: InProcesses) -> None:
    assert in_processes(2, wait_in_vain) == [False, False]


def use_without(switched_off: int, cores: int, store: TcpStore, place: int, size: int) -> str | bool:
    """Return why the memory is not used, or whether its ranks may spin."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, sorted(before)[:cores])
        if place == switched_off:
            os.environ[extension.VARIABLE] = "1"
        extension.load.cache_clear()
        return open_segment(store, "key", place, size, PAIR_BYTES, Deadline(TIMEOUT_S)).may_spin
    except BackendUnavailableError as error:
        return str(error)
    finally:
        os.environ.pop(extension.VARIABLE, None)
        extension.load.cache_clear()
        os.sched_setaffinity(0, before)


def insist_without(store: TcpStore, place: int, size: int) -> str:
    """Ask for shared memory alone on ranks of which the first has no extension."""
    os.environ[extension.VARIABLE] = str(1 - place)
    extension.load.cache_clear()
    settings = NativeSettings(insists_on_memory=True)
    backend = NativeBackend(dict, range(size), place, store.store, settings, TIMEOUT_S, hosts=[0] * size)
    try:
        with pytest.raises(BackendUnavailableError) as caught:
            backend.duplicate("lines")
        return str(caught.value)
    finally:
        backend.close()
        os.environ.pop(extension.VARIABLE)
        extension.load.cache_clear()


@pytest.mark.parametrize("switched_off", [0, 1])
def test_a_rank_without_the_extension_makes_all_leave_the_memory(in_processes: InProcesses, switched_off: int) -> None:
    first, second = in_processes(2, partial(use_without, switched_off, 1))
    assert first == second
    assert "C++ extension on every rank" in str(first)


def test_ranks_that_ask_for_shared_memory_alone_are_refused_without_the_extension(in_processes: InProcesses) -> None:
    first, second = in_processes(2, insist_without)
    assert first == second
    assert first.startswith("DUALDIST_TRANSPORT=shm: shared memory needs dualdist's C++ extension on every rank")


def test_ranks_that_have_a_core_each_may_spin(in_processes: InProcesses) -> None:
    cores = len(os.sched_getaffinity(0))
    assert in_processes(2, partial(use_without, -1, cores)) == [cores >= 2] * 2
    assert in_processes(2, partial(use_without, -1, 1)) == [False] * 2

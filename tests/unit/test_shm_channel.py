"""What ranks exchange and reduce through shared memory; the ranks are threads of this process."""

import itertools
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import pytest
import torch

from dualdist.backends.shm.host import FRAGMENT_BYTES, OPS, HostMessage, memory_bytes
from dualdist.utils import extension

SLOT_BYTES = 1 << 15
WAIT_S = 60.0
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
MORE_RANKS_THAN_CORES = 2 * len(os.sched_getaffinity(0)) + 1
Kind = Callable[..., Any]  # of a channel: its memory, its rank, their number, the size of a slot
Body = Callable[[Any, int], Any]  # of a rank


@pytest.fixture
def kind() -> Kind:
    module = extension.load()
    if module is None:
        pytest.skip("the extension is not built: make setup")
    return lambda *arguments: module.ShmChannel(*arguments, 0.0)


def on_ranks(kind: Kind, size: int, body: Body, slot_bytes: int = SLOT_BYTES) -> list[Any]:
    """Run a body on each of `size` ranks, which are threads; return what it returned on each."""
    memory = mmap.mmap(-1, memory_bytes(size, slot_bytes))
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(body, kind(memory, rank, size, slot_bytes), rank) for rank in range(size)]
        return [rank.result(2 * WAIT_S) for rank in ranks]


def finish(channel: Any) -> None:
    assert channel.advance(WAIT_S)


def whole_numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return different small numbers on each rank, whose sums and products every dtype holds exactly."""
    return (torch.arange(count) * (rank + 3) % 3 + rank % 2).to(dtype)


def expected(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce exactly, by integers."""
    reductions = {"sum": torch.sum, "product": torch.prod, "min": torch.amin, "max": torch.amax}
    return reductions[op](torch.stack(list(parts)).long(), 0).to(parts[0].dtype)


COUNTS = (0, 1, 7, 1000, SLOT_BYTES // 4 - 1, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, SLOT_BYTES + 12345)


@pytest.mark.parametrize("size", [1, 2, 3, MORE_RANKS_THAN_CORES])
def test_every_dtype_is_reduced_exactly_by_every_op(kind: Kind, size: int) -> None:
    cases = list(itertools.product(DTYPES, ("sum", "product", "min", "max"), COUNTS))

    def body(channel: Any, rank: int) -> None:
        for dtype, op, count in cases:
            tensor = whole_numbers(rank, count, dtype)
            channel.begin_allreduce(tensor, tensor, OPS.index(op))
            finish(channel)
            want = expected(op, [whole_numbers(other, count, dtype) for other in range(size)])
            assert torch.equal(tensor, want), (dtype, op, count)

    on_ranks(kind, size, body)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_and_means_round_as_torch_adds_in_rank_order_and_divides(kind: Kind, size: int) -> None:
    cases = list(itertools.product((torch.float32, torch.bfloat16, torch.float16), (1000, 40_000), ("sum", "mean")))

    def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)

    def body(channel: Any, rank: int) -> None:
        for dtype, count, op in cases:
            tensor = values(rank, count, dtype)
            output = torch.full_like(tensor, torch.nan)
            channel.begin_allreduce(tensor, output, OPS.index(op))
            finish(channel)
            want = reduce(torch.add, [values(other, count, dtype).float() for other in range(size)]).to(dtype)
            assert torch.equal(output, want.div_(size) if op == "mean" else want), (dtype, count, op)
            assert torch.equal(tensor, values(rank, count, dtype)), "it is only read"

    on_ranks(kind, size, body)


def test_tensors_may_begin_at_any_element(kind: Kind) -> None:
    def body(channel: Any, rank: int) -> None:
        for dtype, start in itertools.product((torch.uint8, torch.float32, torch.float64), (1, 3)):
            memory = whole_numbers(rank, 20_003, dtype)
            tensor = memory[start:-1]
            channel.begin_allreduce(tensor, tensor, OPS.index("sum"))
            finish(channel)
            assert torch.equal(tensor, expected("sum", [whole_numbers(r, 20_003, dtype) for r in range(3)])[start:-1])
            assert memory[0] == whole_numbers(rank, 1, dtype)
            assert memory[-1] == whole_numbers(rank, 20_003, dtype)[-1], "its neighbours stay as they were"

    on_ranks(kind, 3, body)


def test_an_operation_counts_as_a_change_of_its_tensor(kind: Kind) -> None:
    """Autograd must notice that a tensor which it has saved was overwritten."""

    def body(channel: Any, rank: int) -> None:
        tensor = torch.ones(5)
        for begin in (
            lambda: channel.begin_allreduce(tensor, tensor, OPS.index("sum")),
            lambda: channel.begin_broadcast(tensor, 0),
        ):
            before = tensor._version
            begin()
            finish(channel)
            assert tensor._version > before or rank == 0
        channel.begin_message(b"", tensor)
        finish(channel)
        before = tensor._version
        assert channel.reduce_payloads(tensor, OPS.index("sum"), True) is tensor
        assert tensor._version > before

    on_ranks(kind, 2, body)


def test_operations_of_every_kind_and_size_in_any_order_keep_their_values(kind: Kind) -> None:
    """Nothing may be written over before all have read it, whoever is late."""
    size, numbers = 3, random.Random(0)
    kinds = ["sum", "max", "gather", "broadcast", "message", "payload"]
    cases = [(numbers.choice(kinds), numbers.choice([1, 7, 2000, 20_000])) for _ in range(150)]
    late = [numbers.randrange(size) for _ in cases]

    def body(channel: Any, rank: int) -> None:
        for number, (what, count) in enumerate(cases):
            before = torch.arange(count, dtype=torch.float64) + number
            mine = before + rank
            every = torch.stack([before + other for other in range(size)])
            if late[number] == rank:
                time.sleep(0.001)  # not to wait for anything, but to let the others run ahead
            if what == "gather":
                output = torch.empty(size, count, dtype=torch.float64)
                channel.begin_allgather(mine, output)
                finish(channel)
                assert torch.equal(output, every)
            elif what == "broadcast":
                channel.begin_broadcast(mine, number % size)
                finish(channel)
                assert torch.equal(mine, every[number % size])
            elif what == "message":
                channel.begin_message(b"%d %d" % (rank, number), None)
                finish(channel)
                assert channel.texts() == [b"%d %d" % (other, number) for other in range(size)]
            elif what == "payload":
                channel.begin_message(b"same", mine[:16])
                finish(channel)
                assert channel.are_texts_equal()
                total = channel.reduce_payloads(mine[:16], OPS.index("mean"), False)
                assert torch.allclose(total, every[:, :16].mean(0), rtol=1e-15)
            else:
                channel.begin_allreduce(mine, mine, OPS.index(what))
                finish(channel)
                assert torch.equal(mine, expected(what, every)), (number, what, count)

    on_ranks(kind, size, body)


def test_messages_differ_by_text_and_by_the_size_of_their_payload(kind: Kind) -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    cases = [((b"a", two), (b"a", two)), ((b"a", two), (b"b", two)), ((b"a", two), (b"a", three))]
    cases += [((b"a", two), (b"a", None)), ((b"a", None), (b"ab", None)), ((b"", None), (b"", None))]

    def body(channel: Any, rank: int) -> list[bool]:
        found = []
        for case in cases:
            channel.begin_message(*case[rank])
            finish(channel)
            found.append(channel.are_texts_equal())
        return found

    assert on_ranks(kind, 2, body) == [[True, False, False, False, False, True]] * 2


@pytest.mark.parametrize("size", [2, MORE_RANKS_THAN_CORES])
def test_messages_of_any_length_keep_their_order(kind: Kind, size: int) -> None:
    """And lose no wake-up, in hundreds of steps."""
    lengths = [0, 3, FRAGMENT_BYTES - 1, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 5000]
    chosen = [[random.Random(rank).choice(lengths) for _ in range(100)] for rank in range(size)]

    def sent(rank: int, number: int) -> bytes:
        return b"%d.%d:" % (rank, number) + b"x" * chosen[rank][number]

    def body(channel: Any, rank: int) -> None:
        for number in range(100):
            message = HostMessage(channel, size, sent(rank, number), None)
            assert message.advance(WAIT_S)
            assert message.result == [sent(other, number) for other in range(size)]

    on_ranks(kind, size, body, slot_bytes=1 << 10)


def test_a_rank_that_does_not_come_is_waited_for_without_a_core(kind: Kind) -> None:
    may_come = threading.Event()

    def body(channel: Any, rank: int) -> tuple[bool, float]:
        if rank == 1:
            may_come.wait(WAIT_S)
        channel.begin_message(b"", None)
        if rank == 1:
            return channel.advance(WAIT_S), 0.0
        start = time.thread_time()
        has_ended = channel.advance(0.3)
        used_s = time.thread_time() - start
        may_come.set()
        finish(channel)
        return has_ended, used_s

    (has_ended, used_s), _ = on_ranks(kind, 2, body)
    assert not has_ended
    assert used_s < 0.1


def test_a_signal_ends_a_wait(kind: Kind) -> None:
    """So that Python runs its handler, in the middle of an operation that goes on afterwards."""
    handled_at: list[float] = []
    memory = mmap.mmap(-1, memory_bytes(2, SLOT_BYTES))
    first, second = (kind(memory, rank, 2, SLOT_BYTES) for rank in range(2))
    former = signal.signal(signal.SIGALRM, lambda number, frame: handled_at.append(time.monotonic()))
    try:
        first.begin_message(b"first", None)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        while not handled_at:
            first.advance(2.0)
        assert handled_at[0] - start < 1.0
    finally:
        signal.signal(signal.SIGALRM, former)
    second.begin_message(b"second", None)
    for channel in (first, second):
        finish(channel)
        assert channel.texts() == [b"first", b"second"]


@pytest.mark.parametrize("size", [1, 2, 3, MORE_RANKS_THAN_CORES])
def test_slices_are_reduced_and_shared_exactly(kind: Kind, size: int) -> None:
    """Even slices, uneven ones, and one rank that has all."""
    cases = list(itertools.product((torch.float32, torch.float64, torch.uint8), ("sum", "max"), COUNTS))

    def body(channel: Any, rank: int) -> None:
        for number, (dtype, op, count) in enumerate(cases):
            tensor = whole_numbers(rank, count, dtype)
            lines = -(-tensor.nbytes // 64)
            parts = [lines * r // size for r in range(size)] if number % 3 else [lines * (r > 0) for r in range(size)]
            starts = [*(min(tensor.nbytes, 64 * part) for part in parts), tensor.nbytes]
            channel.begin_reduce_scatter(tensor, starts, OPS.index(op))
            finish(channel)
            want = expected(op, [whole_numbers(other, count, dtype) for other in range(size)])
            own = slice(starts[rank] // dtype.itemsize, starts[rank + 1] // dtype.itemsize)
            assert torch.equal(tensor[own], want[own]), (dtype, op, count)
            channel.begin_share(tensor, starts)
            finish(channel)
            assert torch.equal(tensor, want), (dtype, op, count)

    on_ranks(kind, size, body)


def test_what_does_not_fit_is_refused(kind: Kind) -> None:
    channel = kind(mmap.mmap(-1, memory_bytes(1, SLOT_BYTES)), 0, 1, SLOT_BYTES)
    with pytest.raises(ValueError, match="the message is too long"):
        channel.begin_message(b"x" * SLOT_BYTES, None)
    for starts in ([0], [0, 13], [4, 0], [-1, 4]):
        with pytest.raises(ValueError, match="the slices do not fit"):
            channel.begin_share(torch.ones(3), starts)

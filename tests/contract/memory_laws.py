"""Memory layouts: views, strides, lazily conjugated tensors, and the default device."""

import itertools
from collections.abc import Callable

import torch
from contract.oracle import law, ranks

import dualdist as dd
from dualdist.backends.arithmetic import Op

# Complex products and 64-bit unsigned integers have code of their own.
OPS_OF: dict[torch.dtype, tuple[Op, ...]] = {
    torch.float32: ("sum", "mean", "min", "max", "product", "adasum"),
    torch.float64: ("sum", "mean", "min", "max", "product", "adasum"),
    torch.bfloat16: ("sum", "mean", "min", "max", "product", "adasum"),
    torch.complex64: ("sum", "mean", "product"),
    torch.int16: ("sum", "min", "max", "product"),
    torch.int64: ("sum", "min", "max", "product"),
    torch.uint64: ("sum", "min", "max", "product"),
    torch.bool: ("sum", "min", "max", "product"),
    torch.float8_e4m3fn: ("sum", "mean", "min", "max", "product"),
}


def every_other(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(-1)[::2]


VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    every_other,
    lambda memory: memory[:, 0],
    lambda memory: memory.diagonal(),
    lambda memory: memory[1:2, ::3],
    lambda memory: memory.t()[1:3],
    lambda memory: memory[1],
)


def plain(tensor: torch.Tensor) -> list[complex]:
    wide = tensor.dtype if tensor.dtype.is_complex else torch.float64
    return torch.empty(tensor.shape, dtype=wide).copy_(tensor).flatten().tolist()


@law
def in_place_reductions_write_only_the_view() -> None:
    """Every view with float32, and every other dtype and operation with one of the views in turn."""
    turns = itertools.cycle(enumerate(VIEWS))
    for dtype, ops in OPS_OF.items():
        for op in ops:
            if op == "adasum" and dd.size() & (dd.size() - 1):
                continue
            for number, view in enumerate(VIEWS) if dtype == torch.float32 else [next(turns)]:
                memory = torch.arange(16.0).remainder(5).view(4, 4).to(dtype)
                before, mine = memory.clone(), view(memory)
                mine.copy_((torch.arange(mine.numel()).view(mine.shape) % 2 + 1 + dd.rank()).to(dtype))
                expected = dd.allreduce(mine.clone(memory_format=torch.contiguous_format), op)
                assert dd.allreduce_(mine, op) is mine
                assert plain(mine) == plain(expected), (dtype, op, number)
                view(before).copy_(expected)
                assert plain(memory) == plain(before), (dtype, op, number, "neighbours")


@law
def strides_may_differ_between_ranks() -> None:
    memory = torch.zeros(2, 5)
    mine = memory.t().reshape(-1)[:5] if dd.rank() else memory.view(-1)[::2]
    for op, expected in (("sum", sum(ranks())), ("max", dd.size() - 1)):
        mine.fill_(float(dd.rank()))
        dd.allreduce_(mine, op)  # type: ignore[call-overload]
        assert mine.tolist() == [expected] * 5
        mine.fill_(float(dd.rank()))
        dd.grouped_allreduce_([mine, torch.ones(2)], op)  # type: ignore[call-overload]
        assert mine.tolist() == [expected] * 5
    mine.fill_(float(dd.rank()))
    dd.broadcast_(mine, dd.size() - 1)
    assert mine.tolist() == [float(dd.size() - 1)] * 5
    assert not memory.view(-1)[1::2].any(), "neighbours"


@law
def lazy_conjugation_and_negation_are_resolved_before_sending() -> None:
    """z.conj() and its imaginary part only set a flag: their memory holds the values of z."""
    size = dd.size()
    stored = torch.tensor([1 + 2j, 3 - 1j, 0 + 1j, 2 + 2j]).repeat(size)
    for promised in (stored.conj(), stored.conj().imag):
        assert promised.is_conj() or promised.is_neg()
        kept = promised.clone().resolve_conj().resolve_neg()
        total = kept * size
        for found, expected in (
            (dd.allreduce(promised, "sum"), total),
            (dd.allreduce(promised, "product"), kept**size),
            (dd.grouped_allreduce([promised, promised], "sum")[1], total),
            (dd.reducescatter(promised, "sum"), total[:4]),
            (dd.broadcast(promised), kept),
            (dd.allgather(promised), kept.repeat(size)),
            (dd.grouped_allgather([promised, promised])[1], kept.repeat(size)),
            (dd.alltoall(promised), kept[:4].repeat(size)),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(promised, kept), "the argument is left alone"
    for in_place, expected in (
        (lambda t: dd.allreduce_(t, "sum"), sum(rank + 1 for rank in ranks())),
        (lambda t: dd.grouped_allreduce_([t, t.clone()], "sum"), sum(rank + 1 for rank in ranks())),
        (lambda t: dd.broadcast_(t, size - 1), size),
        (lambda t: dd.broadcast_parameters({"lazy": t}, size - 1), size),
    ):
        memory = stored * (dd.rank() + 1)
        in_place(memory.conj())
        assert torch.equal(memory, stored * expected), "the memory holds the conjugate of the result"
        memory = stored * (dd.rank() + 1)
        in_place(memory.conj().imag)
        assert torch.equal(memory.imag, stored.imag * expected)
        assert torch.equal(memory.real, stored.real * (dd.rank() + 1)), "neighbours"


@law
def the_default_device_of_the_program_is_ignored() -> None:
    """Internal buffers are on the CPU, whatever device the program has set as default."""
    size, one = dd.size(), torch.ones(size_rows := dd.size(), requires_grad=True)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,), check_invariants=True)
    with torch.device("meta"):
        assert dd.broadcast_object({"rank": dd.rank()}) == {"rank": 0}
        assert dd.allgather_object(dd.rank()) == list(ranks())
        rows, received = dd.alltoall(one, [1] * size)
        gathered = dd.allgather(one)
        shared = dd.reducescatter(one, "sum")
        total = dd.allreduce(one, "sum") + dd.broadcast(one)
        (gathered.sum() + rows.sum() + total.sum() + shared.sum()).backward()
        added = dd.allreduce(sparse, "sum")
        dd.barrier()
    assert received.tolist() == [1] * size
    assert gathered.tolist() == [1.0] * size_rows * size
    assert one.grad is not None
    assert one.grad.device.type == "cpu"
    assert added.to_dense().tolist() == [size, 0, 0]

"""Options of dd.wrap_optimizer and hvd.DistributedOptimizer, compared with plain torch on all ranks' batches."""

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from contract.oracle import (
    assert_close,
    gradients,
    law,
    law_alone,
    loss_of,
    mean_gradients,
    net,
    parameters,
    raises,
    ranks,
    total_loss,
)
from torch import nn

import dualdist as dd
import dualdist.hvd as hvd

STEPS = 2
Wrap = Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def by_dd(**options: Any) -> Wrap:
    return lambda optimizer, model: dd.wrap_optimizer(optimizer, model.named_parameters(), **options)


def by_hvd(**options: Any) -> Wrap:
    hvd.init()
    return lambda optimizer, model: hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def assert_trains_like_one_process(
    wrap: Wrap,
    *,
    op: str = "mean",
    passes: int = 1,
    backwards: Sequence[int] = (),
    members: Sequence[int] = (),
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    model: nn.Module | None = None,
    set_to_none: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Check gradients before each step and parameters at the end against one process on the members' batches.

    A step has `passes` backwards, or as many as `backwards` says; step() reduces gradients that are not reduced yet.
    """
    model = net() if model is None else model
    alone = copy.deepcopy(model)
    optimizer, plain = wrap(make(model), model), make(alone)
    members = members or ranks()
    numbers = iter(range(100))
    for count in backwards or [passes] * STEPS:
        optimizer.zero_grad(set_to_none=set_to_none)
        plain.zero_grad()
        own = copy.deepcopy(alone)
        for index, number in enumerate([next(numbers) for _ in range(count)], start=1):
            loss_of(model, dd.rank(), number).backward()
            loss_of(own, dd.rank(), number).backward()
            if index < passes:
                assert_close(gradients(model), gradients(own), rtol, atol)  # not reduced yet
            total = total_loss(alone, number, members)
            (total / len(members) if op == "mean" else total).backward()
        if count % passes == 0:
            assert_close(gradients(model), gradients(alone), rtol, atol)
        optimizer.step()
        plain.step()
        assert_close(gradients(model), gradients(alone), rtol, atol)
    assert_close(parameters(model), parameters(alone), rtol, atol)


@law
def mean_and_sum_train_like_one_process() -> None:
    for wrap in (by_dd(), by_hvd()):
        for set_to_none in (True, False):
            assert_trains_like_one_process(wrap, backwards=(1, 2, 1), set_to_none=set_to_none)
    for wrap in (by_dd(op="sum"), by_hvd(op=hvd.Sum)):
        assert_trains_like_one_process(wrap, op="sum")
    for make in (lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), nesterov):
        assert_trains_like_one_process(by_hvd(), make=make, rtol=1e-4, atol=1e-5)  # Adam divides by small numbers
    # Eight and eleven bits, rounded in each layer, and once more where ranks add up.
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        for wrap in (by_hvd(), by_dd(accumulate=2)):
            assert_trains_like_one_process(wrap, model=net().to(dtype), backwards=(2,), rtol=tolerance, atol=tolerance)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model[:3].parameters()), "lr": 0.2}, {"params": list(model[3:].parameters())}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.8, nesterov=True)


@law
def accumulation_trains_like_one_process() -> None:
    """Also where a step follows fewer backwards, or more."""
    for wrap in (by_dd(accumulate=2), by_hvd(backward_passes_per_step=2)):
        assert_trains_like_one_process(wrap, passes=2, backwards=(2, 1, 3))
    for wrap in (by_dd(accumulate=2, op="sum"), by_hvd(backward_passes_per_step=2, op=hvd.Sum)):
        assert_trains_like_one_process(wrap, op="sum", passes=2, backwards=(2, 1))


@law
def backward_passes_per_step_can_change_between_backwards() -> None:
    model = net()
    optimizer = by_hvd(backward_passes_per_step=3)(sgd(model), model)
    loss_of(model, dd.rank(), 0).backward()
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    loss_of(model, dd.rank(), 1).backward()
    assert_close(gradients(model), mean_gradients(model, (0, 1)))
    optimizer.step()
    raises(ValueError, lambda: optimizer.set_backward_passes_per_step(0), "> 0")


@law
def predivision_only_prevents_overflow() -> None:
    size = dd.size()
    for wrap in (by_dd(gradient_predivide_factor=2.0 * size), by_hvd(gradient_predivide_factor=2.0 * size)):
        assert_trains_like_one_process(wrap)
    assert_trains_like_one_process(by_dd(gradient_predivide_factor=4.0, op="sum"), op="sum")
    large = 40000.0  # in float16, two of them are infinite
    for factor in (1.0, float(size)):
        for wrap in (by_dd(gradient_predivide_factor=factor), by_hvd(gradient_predivide_factor=factor)):
            model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.float16))])
            optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model)
            (model[0] * large).sum().backward()
            right = large if factor == size else float("inf")
            assert model[0].grad.tolist() == [right] * 3, (factor, model[0].grad)
            optimizer.zero_grad()


@law
def gradient_groups_train_like_one_process() -> None:
    for groups in (1, 3, 100):
        assert_trains_like_one_process(by_hvd(groups=groups))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_trains_like_one_process(by_hvd(num_groups=2, backward_passes_per_step=2), passes=2)
    assert [warning.category for warning in caught] == [DeprecationWarning]
    model = net()
    lists = [[model[0].weight, model[4].bias], [model[2].weight, model[2].bias]]
    optimizer = by_hvd(groups=lists, gradient_predivide_factor=2.0)(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        assert_close(gradients(model), mean_gradients(model, (step,)))
    optimizer.step()
    if dd.size() > 1:
        other = net()
        lists = [list(other.parameters())[: 2 + dd.rank() % 2]]
        raises(hvd.HorovodInternalError, lambda: by_hvd(groups=lists)(sgd(other), other), "groups=[[0, 1]]")


@law
def compressed_gradients_are_rounded_once() -> None:
    """float16 cannot hold 1 + 2^-13, bfloat16 not 1 + 2^-9; a mean of equal numbers is not rounded again."""
    fine = {"fp16": 2.0**-13, "bf16": 2.0**-9}
    for name, wrap in {
        "none": by_dd(),
        "fp16": by_dd(compression="fp16"),
        "bf16": by_dd(compression="bf16"),
        "hvd none": by_hvd(),
        "hvd fp16": by_hvd(compression=hvd.Compression.fp16),
    }.items():
        kind = name.split()[-1]
        scale = 1.0 + fine.get(kind, 2.0**-13)
        model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float, torch.double)])
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        sum((param * scale).sum() for param in model).backward()
        for param in model:
            assert param.grad.dtype == param.dtype
            assert param.grad.tolist() == [1.0 if kind in fine else scale] * 2, (name, param.grad)
        optimizer.step()
    # Numbers of 11 bits, added up: an error of 2^-10 of the largest, and momentum adds up two steps of them.
    for wrap in (by_dd(compression="fp16"), by_hvd(compression=hvd.Compression.fp16)):
        assert_trains_like_one_process(wrap, rtol=5e-3, atol=2e-3)


class Fixed(hvd.Compression.none):
    """Sends fixed-point numbers with 16 fractional bits as integers, of another shape."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.double() * 2**16).round().long().reshape(1, -1), (tensor.dtype, tensor.shape)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        dtype, shape = ctx
        return (tensor.double() / 2**16).to(dtype).reshape(shape)


class Halves:
    """Sends twice the gradient in float16, but for the smallest, which it sends unchanged."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        return ((tensor * 2).half(), "halved") if tensor.numel() > 2 else (tensor, "unchanged")

    def decompress(self, tensor: torch.Tensor, ctx: str) -> torch.Tensor:
        assert (tensor.dtype, ctx) in ((torch.float16, "halved"), (torch.float32, "unchanged"))
        return tensor.float() / 2 if ctx == "halved" else tensor


@law
def custom_compressors_are_used() -> None:
    for compressor, tolerance in ((Fixed, 1e-4), (Halves(), 2e-3)):
        for wrap in (by_dd(compression=compressor), by_hvd(compression=compressor)):
            assert_trains_like_one_process(wrap, rtol=2 * tolerance, atol=tolerance)
        assert_trains_like_one_process(by_hvd(compression=compressor, op=hvd.Sum), op="sum", rtol=1e-2, atol=5e-3)
    model = nn.ParameterList([nn.Parameter(torch.ones(2))])
    optimizer = by_dd(compression=Fixed)(torch.optim.SGD(model.parameters(), lr=0.1), model)
    (model[0] * 2.0**-18).sum().backward()
    assert model[0].grad.tolist() == [0.0] * 2, "below what the compressor keeps"
    optimizer.step()


@law_alone
def process_sets_train_independently() -> None:
    """Each set like one process on its batches; a rank outside of the set steps on its own gradients."""
    evens, odds = list(range(0, dd.size(), 2)), list(range(1, dd.size(), 2))
    if not odds or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS"):
        return
    before = dict(os.environ)
    even_set, odd_set = hvd.ProcessSet(evens), hvd.ProcessSet(odds)
    hvd.init(process_sets=[even_set] if len(odds) == dd.size() else [even_set, odd_set])
    for name in set(os.environ) - set(before):
        del os.environ[name]
    mine = (even_set, evens) if even_set.included() else (odd_set, odds)
    for options, oracle in (
        ({}, {}),
        ({"op": hvd.Sum}, {"op": "sum"}),
        ({"backward_passes_per_step": 2, "gradient_predivide_factor": 2.0, "groups": 2}, {"passes": 2}),
    ):
        wrap = by_hvd(process_set=mine[0], **options)
        assert_trains_like_one_process(wrap, members=mine[1], **oracle)
        members = evens if even_set.included() else [dd.rank()]
        assert_trains_like_one_process(by_hvd(process_set=even_set, **options), members=members, **oracle)
    assert_trains_like_one_process(by_hvd())
    model = net()
    raises(NotImplementedError, lambda: by_hvd(op=hvd.Adasum, process_set=even_set)(sgd(model), model))


@law
def training_matches_distributed_data_parallel() -> None:
    """For options that torch has: accumulation is no_sync(), compression a communication hook."""
    if dd.backend() != "native":
        return
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    for compression, rtol, atol in ((None, 1e-5, 1e-6), (hvd.Compression.fp16, 5e-3, 2e-3)):
        model = net()
        model.untouched.requires_grad_(False)
        other = copy.deepcopy(model)
        options = {"compression": compression} if compression else {}
        optimizer, plain = by_hvd(backward_passes_per_step=2, **options)(sgd(model), model), sgd(other)
        parallel = nn.parallel.DistributedDataParallel(other)
        if compression:
            parallel.register_comm_hook(None, fp16_compress_hook)
        for step in range(STEPS):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, dd.rank(), 2 * step).backward()
            loss_of(model, dd.rank(), 2 * step + 1).backward()
            with parallel.no_sync():
                loss_of(parallel, dd.rank(), 2 * step).backward()
            loss_of(parallel, dd.rank(), 2 * step + 1).backward()
            assert_close(gradients(model), gradients(other), rtol, atol)
            optimizer.step()
            plain.step()


@law
def invalid_options_of_distributed_optimizer_are_refused() -> None:
    def refused(*words: str, kind: type[Exception] = ValueError, **options: Any) -> None:
        model = net()
        options = {"named_parameters": model.named_parameters(), **options}
        hvd.init()
        raises(kind, lambda: hvd.DistributedOptimizer(sgd(model), **options), *words)

    names = list(net().named_parameters())
    refused("op=Average", gradient_predivide_factor=2.0, op=hvd.Sum)
    refused("> 0", backward_passes_per_step=0)
    refused("op=3", op=hvd.Min)
    refused("lacks", named_parameters=names)
    refused("lacks", named_parameters=[])
    refused("pairs", named_parameters=[name for name, _ in names])
    refused("unique", named_parameters=[("twice", param) for _, param in names])
    refused("groups=0", groups=0)
    refused("tensors", groups=[["weight"]])
    refused("twice", groups=[[names[0][1]], [names[0][1]]])
    refused("compress", compression=object())
    if dd.size() > 1:
        refused("op=mean", "op=sum", kind=hvd.HorovodInternalError, op=hvd.Sum if dd.rank() % 2 else hvd.Average)

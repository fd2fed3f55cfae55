"""Consistency checks, non-finite gradients, and slow ranks."""

import copy
import functools
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contract.oracle import closure_of, digest, law, law_alone, loss_of, net, raises, train
from torch import nn

import dualdist as dd
from dualdist.errors import DriftError, MismatchError, NonFiniteError, UsageError

# A job of one rank has no wrong rank.
WRONG = 1


def is_wrong() -> bool:
    return dd.rank() == WRONG


@law
def check_consistency_compares_bits_of_every_dtype() -> None:
    model = net()
    dd.check_consistency(model)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
        model[0].bias.fill_(-math.inf)
    dd.check_consistency(model.state_dict())
    dd.check_consistency(list(model.named_parameters()))
    dd.check_consistency(nn.Identity())
    dd.check_consistency({"none": None, "empty": torch.empty(0, 3), "scalar": torch.tensor(True)})
    dtypes = (torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.int64, torch.float8_e4m3fn)
    kept = {str(dtype): torch.arange(7).to(dtype)[1:] for dtype in dtypes}
    dd.check_consistency(kept)
    for name in kept:
        moved = dict(kept)
        if is_wrong():
            moved[name] = kept[name].clone()
            moved[name].view(torch.uint8)[-1] ^= 1
        differs(lambda found=moved: dd.check_consistency(found), f"the first is {name}")


def differs(call: Callable[[], object], *words: str) -> None:
    """Check that the call raises DriftError with the words on every rank, unless there is only one rank."""
    if dd.size() == 1:
        call()
    else:
        raises(DriftError, call, *words)


@law
def drift_errors_name_the_first_parameter_the_ranks_and_the_distance() -> None:
    model = net()
    others = "rank 0" if dd.size() == 2 else "ranks 0, 2, 3"
    with torch.no_grad():
        if is_wrong():
            model[2].weight[3, 5] += 0.5
            model[2].bias[:2] += 0.25
    words = ("2 of 7 tensors differ", "2.weight float32(16, 16)", f"rank 1 differs from {others} in 1 elements, by 0.5")
    differs(lambda: dd.check_consistency(model), *words)
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
        if is_wrong():
            model[2].weight[0, 1:3] = math.inf
    words = ("2.weight", "in 3 elements, by 0.5 at most, holding 1 NaN and 2 infinite", "holding 1 NaN")
    differs(lambda: dd.check_consistency(model), *words)
    dd.broadcast_parameters(model)
    dd.check_consistency(model)


@law
def buffers_are_compared_on_request() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    dd.broadcast_parameters(model)
    model[1].running_mean.fill_(dd.rank())
    dd.check_consistency(model)
    differs(lambda: dd.check_consistency(model, buffers=True), "1.running_mean float32(3,)")
    differs(lambda: dd.check_consistency(model.state_dict()), "1.running_mean float32(3,)")


def wrapped(model: nn.Module, every: int = 1, **options: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return dd.wrap_optimizer(optimizer, model.named_parameters(), check_every=every, **options)  # type: ignore[arg-type]


def training(model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int = 1) -> Callable[[], None]:
    """Return a function that takes a step on this rank's next batches."""
    numbers = itertools.count()

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss_of(model, dd.rank(), next(numbers)).backward()
        optimizer.step()

    return step


def corrupt(model: nn.Module, value: float) -> None:
    """Replace an element of the next gradient of the middle layer on the wrong rank, or on the only one."""
    parameter = model[2].bias  # type: ignore[index]

    def replace(grad: torch.Tensor) -> torch.Tensor:
        hook.remove()
        changed = grad.clone()
        changed[0] = value
        return changed

    if is_wrong() or dd.size() == 1:
        hook = parameter.register_hook(replace)


@law
def non_finite_gradients_prevent_the_step() -> None:
    where = "rank 1" if dd.size() > 1 else "rank 0"
    for options in ({}, {"accumulate": 2, "compression": "bf16"}, {"op": "adasum"}):
        model = net()
        optimizer = wrapped(model, **options)
        for value, word in ((math.nan, "NaN"), (-math.inf, "infinite")):
            step = training(model, optimizer, int(options.get("accumulate", 1)))  # type: ignore[call-overload]
            step()
            before, states = digest(model), str(optimizer.state_dict())
            corrupt(model, value)
            raises(NonFiniteError, step, f"2.bias ({word} on {where})", "was not taken")
            raises(NonFiniteError, optimizer.step, f"2.bias ({word} on {where})", "was not taken")
            assert digest(model) == before
            assert str(optimizer.state_dict()) == states
            optimizer.zero_grad()
            step()
            assert digest(model) != before


@law
def overflow_of_the_compressed_sum_is_reported_without_a_rank() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression="fp16", check_every=1)
    (weight.sum() * 60_000).backward()
    if dd.size() == 1:
        optimizer.step()
    else:
        raises(NonFiniteError, optimizer.step, "w (finite on every rank, but not their sum)")
        assert weight.tolist() == [1.0, 1.0]


@law
def non_finite_gradients_that_are_repaired_or_skipped_by_a_scaler_are_no_error() -> None:
    model = net()
    optimizer = wrapped(model)
    before = digest(model)
    corrupt(model, math.inf)
    loss_of(model, dd.rank()).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    assert digest(model) != before
    for fused in (False, True):
        model = net()
        optimizer = dd.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), check_every=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before = digest(model)
        for value, scale in ((math.inf, 4.0), (1.0, 4.0)):
            optimizer.zero_grad()
            corrupt(model, value)
            scaler.scale(loss_of(model, dd.rank())).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
            assert (digest(model) == before) == math.isinf(value)


@law
def drift_is_found_within_check_every_steps() -> None:
    model = net()
    optimizer = wrapped(model, every=2)
    step = training(model, optimizer)
    step()
    if is_wrong():
        with torch.no_grad():
            model[4].bias[1] += 1e-3
    step()
    before = digest(model)
    differs(step, "before step 3", "4.bias float32(2,)", "rank 1 differs")
    if dd.size() > 1:
        assert digest(model) == before
        dd.broadcast_parameters(model)
        step()
    dd.check_consistency(model)


@law
def different_initial_parameters_are_found_before_the_first_step() -> None:
    model = net(seed=dd.rank())
    differs(training(model, wrapped(model, every=100)), "before step 1", "0.weight")


@law
def ranks_that_begin_apart_are_told_to_broadcast_before_the_first_step() -> None:
    """Once, without check_every; Horovod's face leaves it to the script, as Horovod does."""
    model = net(seed=dd.rank())
    before = digest(model)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    if dd.size() > 1:
        raises(DriftError, loss_of(model, dd.rank()).backward, "0.weight", "Call dd.broadcast_parameters(model)")
        assert digest(model) == before
    dd.broadcast_parameters(model)
    train(model, optimizer, range(2))
    dd.check_consistency(model)
    with torch.no_grad():
        model[0].bias += dd.rank()
    loss_of(model, dd.rank()).backward()


@law
def options_that_differ_are_named_with_their_values() -> None:
    """In the first step, a check or a save."""
    model, here = net(), Path(dd.broadcast_object(tempfile.mkdtemp()))

    def make(**options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **options)

    apart: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "lr of parameter group 0 is 0.1 on rank": lambda: make(lr=0.2 if is_wrong() else 0.1),
        "betas of parameter group 0 is (0.9, 0.999) on rank": lambda: make(betas=(0.5 if is_wrong() else 0.9, 0.999)),
        "class is AdamW on rank": lambda: make() if not is_wrong() else torch.optim.Adam(model.parameters()),
    }
    for words, build in apart.items():
        optimizer = dd.wrap_optimizer(build())
        if dd.size() > 1:
            raises(DriftError, loss_of(model, dd.rank()).backward, words, "on rank 1")
            raises(DriftError, lambda found=optimizer: dd.check_consistency(optimizer=found), words)
            raises(DriftError, lambda found=optimizer: dd.save_checkpoint(here, model=model, optimizer=found), words)
    for shard in (False, True):
        optimizer = dd.wrap_optimizer(make(lr=0.1), check_every=1, shard=shard)
        train(model, optimizer, range(2))
        dd.check_consistency(model, optimizer=optimizer)
        optimizer.param_groups[0]["lr"] = 0.1 + is_wrong()
        differs(training(model, optimizer), "before step 3, lr of parameter group 0 is 0.1 on")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** is_wrong())
    differs(lambda: dd.save_checkpoint(here, scaler=scaler), "the loss scale is 1.0 on rank", "2.0 on rank 1")
    shutil.rmtree(here, ignore_errors=True)


@law
def loaded_state_that_differs_is_found_before_the_first_step() -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, dd.rank()).backward()
    plain.step()
    dd.broadcast_parameters(model)
    dd.wrap_optimizer(plain)
    differs(loss_of(model, dd.rank()).backward, "digest of the optimizer's state is")
    differs(lambda: dd.check_consistency(optimizer=plain), "momentum_buffer of ")


@law
def parameters_are_paired_by_name_in_any_order() -> None:
    """Biases of equal shapes and values; groups of set differences have another order in every process."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).double()
    for layer in model:
        nn.init.zeros_(layer.bias)
    dd.broadcast_parameters(model)
    alone = copy.deepcopy(model)
    biases = [layer.bias for layer in model]
    groups = [{"params": [layer.weight for layer in model]}, {"params": biases[::-1] if is_wrong() else biases}]
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer, reference = dd.wrap_optimizer(make(groups), check_every=1), make(alone.parameters())
    for step in range(3):
        batches = torch.randn(dd.size(), 4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(batches[dd.rank()]).square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        (sum(alone(batch).square().mean() for batch in batches) / dd.size()).backward()
        reference.step()
    for found, right in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(found, right)
    dd.broadcast_optimizer_state(optimizer)
    dd.check_consistency(model, optimizer=optimizer)
    for layer, right in zip(model, alone, strict=True):
        assert torch.allclose(
            optimizer.state[layer.bias]["momentum_buffer"], reference.state[right.bias]["momentum_buffer"]
        )
    if dd.size() > 1:
        raises(MismatchError, lambda: dd.wrap_optimizer(make(groups), shard=True), "in another order")


@law
def what_another_reduces_or_was_converted_is_refused_in_a_sentence() -> None:
    if dd.size() == 1:
        return
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_of(model, dd.rank()).backward()
    optimizer.step()
    model.double()
    optimizer.zero_grad()
    loss_of(model, dd.rank()).backward()
    raises(UsageError, optimizer.step, f"is torch.float64 on {model[0].weight.device} now: the model was converted")
    if torch.distributed.is_initialized():
        ddp = nn.parallel.DistributedDataParallel(net())
        raises(UsageError, lambda: dd.wrap_optimizer(torch.optim.SGD(ddp.parameters(), lr=0.1)), "DistributedDataP")
        late = net()
        optimizer = dd.wrap_optimizer(torch.optim.SGD(late.parameters(), lr=0.1))
        ddp = nn.parallel.DistributedDataParallel(late)
        loss_of(ddp, dd.rank()).backward()
        raises(UsageError, optimizer.step, "DistributedDataParallel reduces")


@law
def gradients_of_closures_are_checked() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.LBFGS(model.parameters(), max_iter=2), check_every=1)
    closure = closure_of(optimizer, lambda: loss_of(model, dd.rank()))
    optimizer.step(closure)
    before = digest(model)
    corrupt(model, math.nan)
    raises(NonFiniteError, lambda: optimizer.step(closure), "(NaN on rank")
    assert digest(model) == before
    optimizer.step(closure)
    if is_wrong():
        with torch.no_grad():
            model[0].bias += 1.0
    differs(lambda: optimizer.step(closure), "before step 3", "rank 1 differs")


@law_alone
def sparse_gradients_and_joined_ranks_are_checked() -> None:
    table, weight = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
    dd.broadcast_parameters(table)
    optimizer = dd.wrap_optimizer(torch.optim.SGD([*table.parameters(), weight], lr=0.1), check_every=1)
    last = dd.size() - 1

    def step(factor: float) -> None:
        optimizer.zero_grad()
        (table(torch.tensor([dd.rank() % 4])).sum() * factor + weight.sum()).backward()
        optimizer.step()

    step(1.0)
    raises(NonFiniteError, lambda: step(math.nan if dd.rank() == last else 1.0), f"(NaN on rank {last})")
    if dd.rank() == last:  # continues alone; parameters are not compared while others have joined
        step(1.0)
        raises(NonFiniteError, lambda: step(math.inf), f"(infinite on rank {last})")
        step(2.0)
    assert dd.join() == last
    dd.broadcast_parameters([("table", table.weight), ("weight", weight)], root=last)
    step(1.0)


@law
def slow_ranks_are_named_with_their_delay() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    dd.slow_ranks()
    for turn, slow in enumerate((dd.size() - 1, 0)):
        pause_s = 0.1 if dd.rank() == slow and dd.size() > 1 else 0.0
        for step in range(3):
            time.sleep(pause_s)
            optimizer.zero_grad()
            loss_of(model, dd.rank(), step).backward()
            optimizer.step()
            time.sleep(pause_s)
            dd.allreduce(torch.ones(1), name="quick" if turn else None)
            dd.allreduce(torch.ones(1), async_op=True).wait()
        found = dd.slow_ranks()
        assert (found.gradient_reductions, found.operations >= 6) == (3, True), found
        assert dd.allgather_object(str(found)) == [str(found)] * dd.size()
        if dd.size() > 1:
            place = found.ranks.index(slow)
            assert found.slowest == slow, found
            assert found.was_last[place] >= 5, found
            # Of the 0.6 s that it slept; on a busy machine every rank is late now and then.
            assert 0.3 < found.caused_s[place] < 5.0, found
            assert found.waited_for_s[place][place] == 0.0
            assert f"waited most for rank {slow}" in str(found)


@law_alone
def joined_ranks_are_not_slow() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    dd.slow_ranks()
    last = dd.size() - 1
    for _ in range(4):
        if dd.rank() < last:
            break
        weight.sum().backward()
        optimizer.step()
        dd.allreduce(torch.ones(1))
    assert dd.join() == last
    if dd.rank() == 0:
        time.sleep(0.3)
    weight.sum().backward()
    optimizer.step()
    found = dd.slow_ranks()
    assert (found.gradient_reductions, found.operations >= 4) == (5, True), found
    if dd.size() > 1:
        assert found.slowest == 0, found
        assert found.waited_for_s[last][0] > 0.15, found  # the last rank may be late, too, on a busy machine

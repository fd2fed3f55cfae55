"""PowerSGD and top-k: nothing is lost, every backend gives the same bits, and residuals are part of checkpoints."""

import copy
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from contract.checkpoint_laws import folder
from contract.oracle import (
    assert_close,
    assert_same_everywhere,
    gradients,
    law,
    law_alone,
    loss_of,
    net,
    parameters,
    raises,
    ranks,
    reopen,
    train,
)
from torch import nn

import dualdist as dd
from dualdist import session
from dualdist.ddp.compression import ErrorFeedback, TopK
from dualdist.ddp.optimizer import get_residuals, get_wrapper
from dualdist.errors import CollectiveError, UnsupportedError, UsageError

SCHEMES = (dd.Compression.powersgd(rank=2), dd.Compression.topk(ratio=0.1))
SHAPES = ((12, 9), (8, 2, 5), (7,), (), (3, 2))


class Weights(nn.Module):
    """Parameters whose gradients are the whole numbers that `coefficients` gives."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def backward(self, step: int, members: Sequence[int] = range(len(SHAPES))) -> None:
        self.zero_grad()
        terms = zip(self.params, coefficients(dd.rank(), step), strict=True)
        losses = [(param * value.to(param)).sum() for param, value in terms]
        sum(losses[member] for member in members).backward()


def coefficients(rank: int, step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-9, 10, shape, generator=random).double() for shape in SHAPES]


def wrapped(model: nn.Module, compression: ErrorFeedback | str, **options: Any) -> torch.optim.Optimizer:
    return dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression, **options)


def unsent(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the sum of the residuals of all ranks."""
    state = get_residuals(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = [state["residuals"].get(number, torch.zeros_like(param)) for number, param in enumerate(params)]
    return [dd.allreduce(each, "sum") for each in own]


def assert_all_is_sent_or_kept(
    received: list[torch.Tensor], scale: int, steps: Sequence[int], optimizer: torch.optim.Optimizer, tolerance: float
) -> None:
    """Check that what was received and what is kept is what the ranks have given in so many steps of each."""
    given = [coefficients(rank, step) for rank, count in enumerate(steps) for step in range(count)]
    found = [total * scale + rest for total, rest in zip(received, unsent(optimizer), strict=True)]
    assert_close(found, [sum(each) for each in zip(*given, strict=True)], tolerance, tolerance)


@law
def what_a_rank_does_not_send_it_keeps_and_sends_later() -> None:
    for scheme in SCHEMES:
        for op, scale in (("mean", dd.size()), ("sum", 1)):
            # Top-k moves whole numbers without rounding; PowerSGD rounds in float64.
            tolerance = 0 if isinstance(scheme, TopK) and scale & (scale - 1) == 0 else 1e-11
            model = Weights()
            optimizer = wrapped(model, scheme, op=op)
            received = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
            for step in range(5):
                model.backward(step)
                for total, param in zip(received, model.params, strict=True):
                    total += param.grad
                if step in (0, 4):
                    assert_same_everywhere(nn.ParameterList(param.grad for param in model.params))
                    assert_all_is_sent_or_kept(received, scale, [step + 1] * dd.size(), optimizer, tolerance)
            assert any(rest.abs().sum() > 0 for rest in unsent(optimizer)), "all was sent: this tests nothing"
            if op == "mean":
                continue
            for _ in range(40):  # without new gradients the rest is sent, too
                model.zero_grad()
                sum((param * 0).sum() for param in model.params).backward()
            assert max(rest.abs().max() for rest in unsent(optimizer)) < 1e-9, f"{scheme}: it keeps something for ever"


@law
def a_residual_stays_where_no_gradient_was_used() -> None:
    """Of a parameter that no rank used, one that only rank 0 used, a step with NaN, and a backward that raised."""
    for scheme in SCHEMES:
        model = Weights()
        optimizer = wrapped(model, scheme)
        model.backward(0)
        before = copy.deepcopy(get_residuals(optimizer))
        model.backward(1, range(1, len(SHAPES)))
        assert model.params[0].grad is None
        after = get_residuals(optimizer)
        assert torch.equal(after["residuals"][0], before["residuals"][0])
        assert not torch.equal(after["residuals"][1], before["residuals"][1])
        model.backward(2, range(0 if dd.rank() == 0 else 1, len(SHAPES)))  # the others count as zero
        assert not torch.equal(get_residuals(optimizer)["residuals"][0], after["residuals"][0])
        before = copy.deepcopy(get_residuals(optimizer))
        model.zero_grad()
        infinite = math.inf if dd.rank() == dd.size() - 1 else 1.0
        sum((param * infinite).sum() for param in model.params).backward()
        assert not any(param.grad.isfinite().all() for param in model.params)
        after = get_residuals(optimizer)
        assert all(torch.equal(after["residuals"][n], before["residuals"][n]) for n in before["residuals"])
        optimizer.step()


def simulated(
    scheme: ErrorFeedback, grads: list[list[torch.Tensor]], memory: list[dict[str, Any]]
) -> list[torch.Tensor]:
    """Return the mean of the ranks' gradients, each a list by parameter; `memory` is kept by parameter."""
    found = []
    for number, (parts, kept) in enumerate(zip(zip(*grads, strict=True), memory, strict=True)):
        size, shape = len(parts), parts[0].shape
        inputs = [part + rest for part, rest in zip(parts, kept.get("residuals", [0.0] * size), strict=True)]
        if isinstance(scheme, TopK):
            count = math.ceil(scheme.ratio * inputs[0].numel())
            if count * (inputs[0].element_size() + 4) >= inputs[0].nbytes:
                found.append(sum(inputs) / size)
                continue
            sent = [torch.zeros_like(each).flatten() for each in inputs]
            for own, each in zip(sent, inputs, strict=True):
                largest = each.flatten().abs().argsort(descending=True)[:count]
                own[largest] = each.flatten()[largest]
            kept["residuals"] = [each - own.view(shape) for each, own in zip(inputs, sent, strict=True)]
            found.append(sum(sent).view(shape) / size)
            continue
        rows = shape[0] if shape else 1
        matrices = [each.reshape(rows, -1) for each in inputs]
        columns = matrices[0].shape[1]
        if (rows + columns) * scheme.rank >= rows * columns:
            found.append(sum(inputs) / size)
            continue
        random = torch.Generator().manual_seed(number)
        first = torch.randn(columns, scheme.rank, generator=random, dtype=inputs[0].dtype)
        q = torch.linalg.qr(kept.get("q", first)).Q
        p = torch.linalg.qr(sum(each @ q for each in matrices)).Q
        own_q = [each.t() @ p for each in matrices]
        kept["q"] = sum(own_q)
        rests = [torch.addmm(each, p, own.t(), alpha=-1) for each, own in zip(matrices, own_q, strict=True)]
        kept["residuals"] = [rest.view(shape) for rest in rests]
        found.append((p @ kept["q"].t()).view(shape) / size)
    return found


@law
def compressed_gradients_are_those_of_ranks_in_one_process() -> None:
    """At two ranks to the bit, so that all backends agree."""
    for scheme in SCHEMES:
        for dtype in (torch.float32, torch.float64):
            model = net().to(dtype)
            model.untouched.requires_grad_(False)
            optimizer = wrapped(model, scheme)
            alone = copy.deepcopy(model)
            used = [param for param in alone.parameters() if param.requires_grad]
            memory: list[dict[str, Any]] = [{} for _ in used]
            for step in range(6):
                train(model, optimizer, [step])
                each = [torch.autograd.grad(loss_of(alone, rank, step), used) for rank in ranks()]
                means = simulated(scheme, [list(grads) for grads in each], memory)
                own = [param.grad for param in model.parameters() if param.requires_grad]
                assert_close(own, means, *((0, 0) if dd.size() <= 2 else (1e-4, 1e-6)))
                alone.load_state_dict(model.state_dict())


@law
def bytes_are_as_the_formulas_say() -> None:
    for dtype, item in ((torch.float64, 8), (torch.bfloat16, 4)):
        whole = [math.prod(shape) * item for shape in SHAPES]
        low_rank = [(12 + 9) * 2 * item, (8 + 10) * 2 * item, *whole[2:]]
        top = [11 * (4 + item), 8 * (4 + item), 1 * (4 + item), item, 1 * (4 + item)]
        for scheme, expected in zip(SCHEMES, (low_rank, top), strict=True):
            model = Weights(dtype)
            optimizer = wrapped(model, scheme)
            model.backward(0)
            assert get_wrapper(optimizer).reducer.sent_bytes == sum(expected), (scheme, dtype)
    model = Weights(torch.float32)
    optimizer = wrapped(model, "bf16")
    model.backward(0)
    assert get_wrapper(optimizer).reducer.sent_bytes == sum(math.prod(shape) for shape in SHAPES) * 2


@law
def the_first_steps_are_not_compressed() -> None:
    for scheme in (dd.Compression.powersgd(1, warmup_steps=3), dd.Compression.topk(0.05, warmup_steps=3)):
        model, plain = Weights(), Weights()
        optimizers = [wrapped(model, scheme), wrapped(plain, None)]  # which own the reduction
        for step in range(4):
            for each in (model, plain):
                each.backward(step)
            are_equal = [torch.equal(*pair) for pair in zip(gradients(model), gradients(plain), strict=True)]
            assert all(are_equal) if step < 3 else not all(are_equal), (scheme, step)
        del optimizers


@law
def a_resumed_training_sends_what_was_left() -> None:
    """With as many ranks to the bit; and with another scheme."""
    for scheme in SCHEMES:
        model = net()
        optimizer = wrapped(model, scheme)
        train(model, optimizer, range(4))
        with folder() as path:
            dd.save_checkpoint(path, model=model, optimizer=optimizer)
            kept = copy.deepcopy(get_residuals(optimizer))
            train(model, optimizer, range(4, 8))
            expected = parameters(model)
            again = net(seed=5)
            dd.broadcast_parameters(again)
            resumed = wrapped(again, scheme)
            train(again, resumed, range(2))
            dd.load_checkpoint(path, model=again, optimizer=resumed)
            train(again, resumed, range(4, 8))
            assert_close(parameters(again), expected, 0, 0)
            other = wrapped(net(), "powersgd:1" if isinstance(scheme, TopK) else "topk")
            dd.load_checkpoint(path, optimizer=other)
            found = get_residuals(other)
            assert found["reductions"] == kept["reductions"] == 4
            assert all(torch.equal(found["residuals"][n], kept["residuals"][n]) for n in kept["residuals"])
            plain = torch.optim.SGD(net().parameters(), lr=0.1)
            dd.load_checkpoint(path, optimizer=plain)


@law_alone
def what_was_not_sent_survives_a_change_of_ranks() -> None:
    """Each rank resumes as a job of one: its mean, or its sum, of what is left is that of all ranks before."""
    groups = [dd.new_group([rank]) for rank in ranks()]
    for scheme in SCHEMES:
        for op, divisor in (("mean", dd.size()), ("sum", 1)):
            model, alone = Weights(), Weights()
            optimizer = wrapped(model, scheme, op=op)
            single = wrapped(alone, scheme, op=op, group=groups[dd.rank()])
            for step in range(3):
                model.backward(step)
            with folder() as path:
                dd.save_checkpoint(path, optimizer=optimizer)
                dd.load_checkpoint(path, optimizer=single)
            found, expected = get_residuals(single)["residuals"], unsent(optimizer)
            for number, total in enumerate(expected):
                left = found.get(number, torch.zeros_like(total))
                torch.testing.assert_close(left, total / divisor, rtol=1e-14, atol=1e-14)


@law
def residuals_are_freed_after_their_optimizer() -> None:
    """With the next one that is wrapped, as its buckets are."""
    for scheme in SCHEMES:
        first, model = wrapped(net(), scheme), net()
        optimizer = wrapped(model, scheme)
        train(model, optimizer, range(2))
        residuals = [*map(weakref.ref, get_wrapper(optimizer).reducer.registry.export_state()["residuals"].values())]
        assert residuals
        del optimizer, model
        second = wrapped(net(), scheme)
        assert not any(reference() is not None for reference in residuals)
        del first, second


@law_alone
def elastic_state_in_memory_keeps_what_was_not_sent() -> None:
    """In the next session, and from the last commit after a failure; the last factors and the warm-up, too."""
    backend = dd.backend()
    for compression in ("powersgd:2", "topk:0.1"):
        model = net()
        optimizer = wrapped(model, compression)
        state = dd.elastic.State(model=model, optimizer=optimizer)
        state.sync()
        train(model, optimizer, range(3))
        state.commit()
        expected = copy.deepcopy(get_residuals(optimizer))
        for has_failed in (False, True):
            if has_failed:
                train(model, optimizer, range(2))
                session.current().world.channel.latch.fail(CollectiveError("a rank was lost"))
                state.restore()
            dd.shutdown()
            reopen(backend)
            state._rebind_optimizers()
            state.sync()
            found = get_residuals(optimizer)
            assert found["reductions"] == expected["reductions"] == 3
            for part in ("residuals", "factors"):
                assert found[part].keys() == expected[part].keys()
                assert all(torch.equal(found[part][n], expected[part][n]) for n in found[part])
        del state, optimizer


@law
def sharded_steps_end_with_the_same_parameters() -> None:
    for scheme in SCHEMES:
        models = [net(), net()]
        for model, shard in zip(models, (False, True), strict=True):
            train(model, wrapped(model, scheme, shard=shard), range(4))
        assert_close(parameters(models[0]), parameters(models[1]), 0, 0)


@law_alone
def ranks_that_have_joined_send_what_they_kept() -> None:
    for scheme in SCHEMES:
        model = Weights()
        optimizer = wrapped(model, scheme)
        received = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(2 if dd.rank() else 6):
            model.backward(step)
            for total, param in zip(received, model.params, strict=True):
                total += param.grad
        dd.join()
        received = [dd.broadcast(each, 0) for each in received]
        assert_all_is_sent_or_kept(received, dd.size(), [6] + [2] * (dd.size() - 1), optimizer, 1e-11)
        del optimizer


@law
def training_ends_with_the_loss_of_torchs_powersgd_hook() -> None:
    if dd.backend() != "native":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    model = net()
    model.untouched.requires_grad_(False)
    other = copy.deepcopy(model)
    optimizer = wrapped(model, dd.Compression.powersgd(2, warmup_steps=10))
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    parallel = nn.parallel.DistributedDataParallel(other)
    options: Any = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 10, "min_compression_rate": 1}
    parallel.register_comm_hook(hook.PowerSGDState(None, **options), hook.powerSGD_hook)
    losses = []
    for step in range(200):
        found = []
        for each, owner in ((model, optimizer), (parallel, plain)):
            owner.zero_grad()
            loss = loss_of(each, dd.rank(), step)
            loss.backward()
            owner.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    ours, torchs = dd.allreduce(torch.stack(losses[-50:]).mean(0))
    assert abs(ours - torchs) < 0.02 * torchs
    assert ours < 0.2 * dd.allreduce(losses[0][0])


@law
def what_cannot_be_compressed_is_refused() -> None:
    for wrong, words in (
        ("powersgd:0", "rank=0"),
        ("topk:0", "ratio=0"),
        ("topk:1.5", "ratio=1.5"),
        ("powersgd:x", "powersgd:RANK"),
        ("powersgd:", "powersgd:RANK"),
        ("topk:.", "topk:RATIO"),
    ):
        raises(UsageError, lambda wrong=wrong: wrapped(net(), wrong), words)
    raises(UsageError, lambda: dd.Compression.powersgd(warmup_steps=-1), "warmup_steps=-1")
    for scheme in SCHEMES:
        if dd.size() & (dd.size() - 1) == 0:
            raises(UsageError, lambda scheme=scheme: wrapped(net(), scheme, op="adasum"), "Adasum", "choose one")
        raises(UsageError, lambda scheme=scheme: wrapped(net(), scheme, reduction="ordered"), "ordered", "choose one")


@law_alone
def sparse_gradients_are_refused_or_sent_as_dense_ones() -> None:
    for scheme in SCHEMES:
        table = nn.Embedding(20, 10, sparse=True)
        dd.broadcast_parameters(table)
        optimizer = wrapped(table, scheme, sparse_as_dense=True)
        table(torch.arange(3)).sum().backward()
        assert table.weight.grad.is_sparse
    table = nn.Embedding(20, 10, sparse=True)
    dd.broadcast_parameters(table)
    optimizer = wrapped(table, SCHEMES[0])  # it owns the reduction
    raises(UnsupportedError, lambda: table(torch.arange(3)).sum().backward(), "sparse_as_dense=True", "PowerSGD(")
    del optimizer

"""The laws of backwards that run again, raise or recompute, and of gradients kept, changed, sparse or of any dtype."""

from __future__ import annotations

import warnings

import torch
from contract.oracle import (
    assert_close,
    assert_same_everywhere,
    batch,
    gradients,
    law,
    law_alone,
    loss_of,
    mean_gradients,
    net,
    raises,
    ranks,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualdist as dd
from dualdist.errors import CollectiveError, UsageError


@law
def gradients_are_the_mean_when_backward_returns() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        assert_close(gradients(model), mean_gradients(model, (step,)))
        optimizer.step()
    assert model.untouched.grad is None


@law
def a_second_backward_adds_to_the_first() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, dd.rank(), 0).backward()
    loss_of(model, dd.rank(), 1).backward()
    assert_close(gradients(model), mean_gradients(model, (0, 1)))
    optimizer.step()


@law
def a_backward_that_raised_does_not_spoil_the_next() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    x, y = batch(dd.rank())
    hidden = model[1](model[0](x))
    hidden.register_hook(refuse)
    rest = model[4](model[3](model[2](hidden)))
    raises(ValueError, lambda: nn.functional.mse_loss(rest, y).backward(), "refused")
    optimizer.zero_grad()
    loss_of(model, dd.rank(), 1).backward()
    assert_close(gradients(model), mean_gradients(model, (1,)))
    optimizer.step()


@law_alone
def gradients_of_an_interrupted_backward_are_not_lost() -> None:
    """Nothing is dropped between the two backwards: what the first one left adds up with the second."""
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1 << 19))  # a bucket of its own, sent at once
    optimizer = dd.wrap_optimizer(torch.optim.SGD([first, last], lr=0.1))
    scale = float(dd.rank() + 1)
    mean = sum(rank + 1 for rank in ranks()) / dd.size()

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    product = first * 2
    product.register_hook(refuse)
    loss = product.sum() + last.sum() * scale  # autograd begins with what was computed last
    raises(ValueError, loss.backward, "refused")
    (last.sum() * scale + first.sum() * scale).backward()
    assert torch.allclose(last.grad, torch.full_like(last, 2 * mean))
    assert torch.allclose(first.grad, torch.full_like(first, mean))
    optimizer.step()


@law_alone
def a_round_that_an_interrupted_backward_began_is_dropped_by_all_ranks() -> None:
    """Ranks raise at different places, one alone before or after it has sent something, and each tries again."""
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1 << 19))  # a bucket of its own, sent at once
    optimizer = dd.wrap_optimizer(torch.optim.SGD([first, last], lr=0.1))

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("refused")

    def interrupt(place: str) -> None:
        """Before any gradient is finished, after that of `last`, or after both."""
        end = torch.ones(1, requires_grad=True) * 2  # autograd begins with what was computed last
        middle = first * 2
        start = end + middle + last.sum() * 100
        {"start": start, "middle": middle, "end": end}[place].register_hook(refuse)
        raises(ValueError, start.backward, "refused")

    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    for places in (["start", "middle"], ["middle", "start"], ["end", "middle"], ["start"], ["middle"], ["end"]):
        if dd.rank() < len(places):
            interrupt(places[dd.rank()])
        optimizer.zero_grad()
        ((first.sum() + last.sum()) * (dd.rank() + 1)).backward()
        assert torch.allclose(last.grad, torch.full_like(last, mean)), places
        assert torch.allclose(first.grad, torch.full_like(first, mean)), places
        optimizer.step()
    for bucket in optimizer._dualdist_wrapper.reducer._buckets:
        bucket.reads_flags_late = True  # as on a GPU, where the others do not hear of it in time
    if dd.rank() == 0:
        interrupt("middle")
    if dd.rank() == 0 and dd.size() > 1:
        raises(CollectiveError, first.sum().backward, "a backward raised on this rank", "from a checkpoint")
    else:
        (first.sum() + last.sum()).backward()


@law_alone
def a_parameter_inside_and_outside_a_checkpoint_keeps_both_gradients() -> None:
    shared, other = nn.Parameter(torch.ones(1 << 19)), nn.Parameter(torch.ones(3))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([other, shared], lr=0.1))
    x = torch.ones(1 << 19, requires_grad=True)
    inside = checkpoint(lambda t: t * shared, x * other.sum(), use_reentrant=True)
    (inside.sum() * (dd.rank() + 1) + shared.sum()).backward()
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    assert torch.allclose(shared.grad, torch.full_like(shared, 3 * mean + 1))
    optimizer.step()


@law
def second_derivatives_leave_the_reduction_alone() -> None:
    weight = nn.Parameter(torch.full((2,), 3.0))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that is taken apart below
        (weight.square().sum() * (dd.rank() + 1)).backward(create_graph=True)
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    assert torch.allclose(weight.grad, torch.full((2,), 6 * mean))
    weight.grad = None  # the graph keeps a cycle alive otherwise
    optimizer.step()


@law
def a_sum_is_not_summed_again() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), op="sum")
    weight.sum().backward()
    raises(UsageError, lambda: weight.sum().backward(), "zero_grad")
    optimizer.zero_grad()
    weight.sum().backward()
    assert weight.grad.tolist() == [float(dd.size())] * 2
    optimizer.step()


@law
def reentrant_checkpointing_gives_the_mean() -> None:
    for reentrant in (True, False):
        model = net()
        optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = batch(dd.rank())
        hidden = checkpoint(lambda h, m=model: m[3](m[2](m[1](m[0](h)))), x.requires_grad_(), use_reentrant=reentrant)
        nn.functional.mse_loss(model[4](hidden), y).backward()
        assert_close(gradients(model), mean_gradients(model))
        optimizer.step()


@law
def a_compressor_may_leave_some_gradients_as_they_are() -> None:
    class LargeOnes:
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            return tensor.half() if tensor.numel() > 1 else tensor, tensor.dtype

        def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
            assert tensor.dtype == (torch.float16 if tensor.numel() > 1 else torch.float32)
            return tensor.to(ctx)

    model = nn.Linear(2, 1)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=LargeOnes())
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)) * (dd.rank() + 1)).sum().backward()
        assert model.bias.grad.tolist() == [mean]
        assert model.weight.grad.tolist() == [[mean, mean]]


@law
def gradients_that_a_program_keeps_are_left_alone() -> None:
    """As in one process: a tensor that was .grad keeps its values when the next backward makes new ones."""
    weight = nn.Parameter(torch.ones(1 << 16))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    kept = []
    for step in range(4):
        optimizer.zero_grad()
        (weight.sum() * (dd.rank() + 1) * 10**step).backward()
        kept.append(weight.grad if step % 2 else weight.grad[:5])
    for step, grad in enumerate(kept):
        assert torch.allclose(grad, torch.full_like(grad, mean * 10**step)), step
    del kept, grad
    mine = torch.zeros_like(weight)
    for step in range(3):
        weight.grad = mine.zero_()
        (weight.sum() * (dd.rank() + 1)).backward()
        assert weight.grad is mine, "what the program keeps stays the gradient"
        assert torch.allclose(mine, torch.full_like(mine, mean)), step


@law
def a_gradient_that_another_hook_changes_is_reduced_as_it_became() -> None:
    weight, last = nn.Parameter(torch.ones(1 << 16)), nn.Parameter(torch.ones(1))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([last, weight], lr=0.1))

    def clamp(param: torch.Tensor) -> None:
        param.grad.clamp_(max=1.0)

    weight.register_post_accumulate_grad_hook(clamp)
    finished_last = last.sum()  # autograd goes backwards
    (weight.sum() * 5 * (dd.rank() + 1) + finished_last).backward()
    assert torch.equal(weight.grad, torch.ones(1 << 16))
    optimizer.step()


@law
def parameters_of_several_dtypes_and_layouts_are_reduced() -> None:
    half = nn.Parameter(torch.ones(3, dtype=torch.float16))
    double = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    image = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([half, double, image], lr=0.1))
    scale = float(dd.rank() + 1)
    (half.sum().double() * scale + double.sum() * scale + image.sum() * scale).backward()
    mean = sum(rank + 1 for rank in ranks()) / dd.size()
    for param in (half, double, image):
        assert param.grad.dtype == param.dtype
        assert torch.allclose(param.grad, torch.full_like(param, mean))
    optimizer.step()


@law_alone
def many_buckets_leave_in_one_order() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(512, 600) for _ in range(6)]  # 1.2 MB each: several buckets
    model = nn.ModuleList(layers)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    order = layers if dd.rank() % 2 else layers[::-1]  # ranks finish their gradients in another order
    for layer in order:
        nn.init.zeros_(layer.weight)
    sum((index + 1) * layer(torch.ones(1, 512)).sum() for index, layer in enumerate(order)).backward()
    for index, layer in enumerate(layers):
        scales = [index + 1 if rank % 2 else 6 - index for rank in ranks()]
        assert torch.allclose(layer.bias.grad, torch.full((600,), sum(scales) / dd.size())), index
    optimizer.step()


@law
def sparse_gradients_are_the_mean_of_everybodys() -> None:
    """For each rank another row, for rank 0 none in the second step; twice, as the buffers change after the first."""
    for dense in (False, True):
        embedding = torch.nn.Embedding(dd.size() + 1, 3, sparse=True)
        dd.broadcast_parameters(embedding)
        linear = torch.nn.Linear(3, 1)
        dd.broadcast_parameters(linear)
        params = [*embedding.parameters(), *linear.parameters()]
        optimizer = dd.wrap_optimizer(torch.optim.SGD(params, lr=1.0), sparse_as_dense=dense)
        for step in range(3):
            optimizer.zero_grad()
            touched = [rank for rank in ranks() if rank or step != 1]
            if dd.rank() in touched:
                linear(embedding(torch.tensor([dd.rank(), dd.rank()]))).sum().backward()
            else:
                linear(torch.zeros(3)).sum().backward()
            expected = torch.zeros_like(embedding.weight)
            expected[touched] = 2 * linear.weight.detach() / dd.size()
            if touched:
                assert embedding.weight.grad.is_sparse
                torch.testing.assert_close(embedding.weight.grad.to_dense(), expected)
            optimizer.step()
        assert_same_everywhere(embedding)

"""Backward passes that run again, raise, recompute, or finish in another order on each rank."""

import warnings

import torch
from contract.oracle import law, law_alone, loss_of, mean_scale, net, raises, ranks, refuse
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualdist as dd
from dualdist.errors import CollectiveError, UsageError


def two_buckets() -> tuple[nn.Parameter, nn.Parameter, torch.optim.Optimizer]:
    """Return a small parameter, a large one whose bucket is sent at once, and their optimizer."""
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1 << 19))
    return first, last, dd.wrap_optimizer(torch.optim.SGD([first, last], lr=0.1))


def assert_reduced(mean: complex, *params: nn.Parameter) -> None:
    """Every element of their gradients is the mean."""
    for param in params:
        torch.testing.assert_close(param.grad, torch.full_like(param, mean))


@law_alone
def gradients_of_an_interrupted_backward_add_to_the_next() -> None:
    """Without zero_grad() in between."""
    first, last, optimizer = two_buckets()
    scale = float(dd.rank() + 1)
    product = first * 2
    product.register_hook(refuse)
    loss = product.sum() + last.sum() * scale  # autograd begins with what was computed last
    raises(ValueError, loss.backward, "refused")
    (last.sum() * scale + first.sum() * scale).backward()
    assert_reduced(2 * mean_scale(), last)
    assert_reduced(mean_scale(), first)
    optimizer.step()


@law_alone
def every_rank_drops_the_reduction_that_an_interrupted_backward_began() -> None:
    """Ranks raise at different points, or one raises alone before or after a bucket was sent; each retries."""
    first, last, optimizer = two_buckets()

    def interrupt(place: str) -> None:
        """Raise before any gradient is ready, after that of `last`, or after both."""
        end = torch.ones(1, requires_grad=True) * 2  # autograd begins with what was computed last
        middle = first * 2
        start = end + middle + last.sum() * 100
        {"start": start, "middle": middle, "end": end}[place].register_hook(refuse)
        raises(ValueError, start.backward, "refused")

    for places in (
        *(["start", "middle"], ["middle", "start"], ["end", "middle"], ["start"], ["middle"], ["end"]),
        ["middle"] * dd.size(),
    ):
        if dd.rank() < len(places):
            interrupt(places[dd.rank()])
        optimizer.zero_grad()
        ((first.sum() + last.sum()) * (dd.rank() + 1)).backward()
        assert_reduced(mean_scale(), last, first)
        optimizer.step()
    optimizer.zero_grad()
    for bucket in optimizer._dualdist_wrapper.reducer.registry.buckets:
        bucket.reads_flags_late = True  # as on a GPU, where other ranks learn of it too late
    if dd.rank() == 0:
        interrupt("middle")
    if dd.rank() == 0 and dd.size() > 1:
        raises(CollectiveError, first.sum().backward, "a backward raised on this rank", "from a checkpoint")
    else:
        (first.sum() + last.sum()).backward()


@law_alone
def a_backward_that_raised_while_it_accumulated_into_buckets_needs_zero_grad() -> None:
    first, last, optimizer = two_buckets()

    def interrupt() -> None:
        middle = first * 2
        start = middle + last.sum() * 100
        middle.register_hook(refuse)
        raises(ValueError, start.sum().backward, "refused")

    for set_to_none in (False, True):
        (first.sum() + last.sum()).backward()
        interrupt()
        optimizer.zero_grad(set_to_none=set_to_none)
        ((first.sum() + last.sum()) * (dd.rank() + 1)).backward()
        assert_reduced(mean_scale(), last, first)
    interrupt()
    dd.barrier()  # the first of the ranks to raise ends the session
    if dd.size() > 1:
        raises(CollectiveError, first.sum().backward, "after an exception call zero_grad()", "=False")


@law_alone
def a_parameter_used_inside_and_outside_a_checkpoint_gets_both_gradients() -> None:
    shared, other = nn.Parameter(torch.ones(1 << 19)), nn.Parameter(torch.ones(3))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([other, shared], lr=0.1))
    x = torch.ones(1 << 19, requires_grad=True)
    inside = checkpoint(lambda t: t * shared, x * other.sum(), use_reentrant=True)
    (inside.sum() * (dd.rank() + 1) + shared.sum()).backward()
    assert_reduced(3 * mean_scale() + 1, shared)
    optimizer.step()


@law_alone
def reentrant_checkpoints_on_some_ranks_are_an_error_on_all() -> None:
    """Its inner backward would be reduced with the whole one of other ranks."""
    first, other = nn.Parameter(torch.ones(1 << 19)), nn.Parameter(torch.ones(3))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([other, first], lr=0.1))
    x = torch.ones(1 << 19, requires_grad=True)

    def loss(reentrant: bool) -> torch.Tensor:
        optimizer.zero_grad()
        inside = checkpoint(lambda t: t * first, x, use_reentrant=reentrant)
        return (inside.sum() + other.sum()) * (dd.rank() + 1)

    for reentrant in (True, False, True):
        loss(reentrant).backward()
        assert_reduced(mean_scale(), first, other)
        optimizer.step()
    if dd.size() > 1:
        raises(CollectiveError, loss(dd.rank() == 0).backward, "use_reentrant=False")


@law
def a_step_after_a_backward_that_raised_sends_nothing_of_it() -> None:
    """As of a loop that skips a batch: what had been packed, and sent, was cleared."""
    first, last, optimizer = two_buckets()
    for _ in range(3):
        optimizer.zero_grad()
        if dd.rank() == 0:
            middle = first * 2
            middle.register_hook(refuse)
            raises(ValueError, (middle.sum() + last.sum() * 100).backward, "refused")
            optimizer.zero_grad()
        else:
            ((first.sum() + last.sum()) * 3).backward()
        optimizer.step()
        if dd.size() > 1:
            assert_reduced(3 * (dd.size() - 1) / dd.size(), last, first)


@law
def conjugated_gradients_and_frozen_parameters_are_reduced() -> None:
    weight, frozen = nn.Parameter(torch.ones(3, dtype=torch.complex64)), nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight, frozen], lr=0.1)
    optimizer = dd.wrap_optimizer(sgd, gradient_as_bucket_view=False)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step < 1)
        frozen.requires_grad_(step < 1)
        loss = (weight.conj() * 1j).real.sum() * (dd.rank() + 1)
        (loss + frozen.sum() if step < 1 else loss).backward()
        assert_reduced(1j * mean_scale(), weight)
        optimizer.step()


def halve(param: torch.Tensor) -> None:
    param.grad.mul_(0.5)


@law
def hooks_that_are_registered_after_wrapping_are_respected() -> None:
    first, last, optimizer = two_buckets()
    for param in (first, last):
        param.register_post_accumulate_grad_hook(halve)
    for _ in range(3):
        optimizer.zero_grad()
        ((first.sum() + last.sum()) * (dd.rank() + 1)).backward()
        assert_reduced(mean_scale() / 2, last, first)
        optimizer.step()


@law
def backward_with_create_graph_is_reduced() -> None:
    weight = nn.Parameter(torch.full((2,), 3.0))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that is taken apart below
        (weight.square().sum() * (dd.rank() + 1)).backward(create_graph=True)
    assert_reduced(6 * mean_scale(), weight)
    weight.grad = None  # the graph keeps a cycle alive otherwise
    optimizer.step()


@law
def a_second_backward_with_op_sum_needs_zero_grad() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), op="sum")
    weight.sum().backward()
    raises(UsageError, lambda: weight.sum().backward(), "zero_grad")
    optimizer.zero_grad()
    weight.sum().backward()
    assert weight.grad.tolist() == [float(dd.size())] * 2
    optimizer.step()


@law_alone
def a_second_sum_is_refused_where_the_first_had_new_buckets_made() -> None:
    """Gradients arrive in another order than that of the optimizer's parameters."""
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD([*model.parameters()][::-1], lr=0.1), op="sum")
    loss_of(model, dd.rank()).backward()
    raises(UsageError, lambda: loss_of(model, dd.rank()).backward(), "zero_grad", "use_reentrant=False")
    optimizer.zero_grad()


@law_alone
def buckets_are_sent_in_one_order_on_every_rank() -> None:
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

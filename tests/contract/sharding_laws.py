"""shard=True: each rank keeps a part of the optimizer's state, and everything else is as without it."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from contract.checkpoint_laws import folder
from contract.oracle import assert_same_everywhere, closure_of, law, law_alone, loss_of, net, parameters, raises, reopen
from torch import nn

import dualdist as dd
from dualdist import session
from dualdist.collectives.broadcast_state import optimizer_params
from dualdist.ddp.optimizer import move_to_group
from dualdist.errors import CollectiveError, MismatchError, UsageError

Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, centered=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),  # not element by element
}
# At two ranks a sum has one order anyway.
ORDERED: Any = {"reduction": "ordered"}


class Odd(nn.Module):
    """Frozen and unused parameters, tied weights, one that only rank 0 uses, strides, gaps and another dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net(seed=5)  # with a parameter that nobody uses
        self.net[2].bias.requires_grad_(False)
        self.head, self.tied = nn.Linear(2, 6), nn.Linear(2, 6, bias=False)
        self.tied.weight = self.head.weight
        self.of_rank_0 = nn.Parameter(torch.ones(5))
        self.strided = nn.Parameter(torch.ones(4, 2).t())
        self.gaps = nn.Parameter(torch.ones(2, 4)[:, :2])
        self.bits16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.added = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.net(x)
        found = found + self.tied(found)[:, :2] + self.head(found)[:, 2:4] * self.strided.sum(1)
        found = found * self.gaps.sum() + self.bits16.sum().float() * self.added.sum()
        return found * self.of_rank_0.mean() if dd.rank() == 0 else found


def unwrapped(make: Make) -> tuple[Odd, torch.optim.Optimizer]:
    model = Odd()
    groups = [
        {"params": [param for name, param in model.named_parameters() if name.startswith("net")]},
        {"params": [*model.head.parameters(), model.of_rank_0, model.strided, model.gaps, model.bits16], "lr": 0.02},
    ]
    return model, make(groups)


def build(make: Make, *, shard: bool, **options: Any) -> tuple[Odd, torch.optim.Optimizer]:
    model, optimizer = unwrapped(make)
    return model, dd.wrap_optimizer(optimizer, shard=shard, **ORDERED, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, accumulate: int = 1) -> None:
    """Train with a schedule and clipping by the norm of all gradients."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in steps:
        optimizer.zero_grad()
        for part in range(accumulate):
            (loss_of(model, dd.rank(), step * accumulate + part) / accumulate).backward()
        dd.clip_grad_norm_(optimizer_params(optimizer), 0.5)
        optimizer.step()
        scheduler.step()


def assert_same(found: Any, expected: Any) -> None:
    """Equal in every bit and type, in states of nested dicts and lists."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), (found, expected)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_same(value, expected[key])
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    else:
        assert found == expected


def held_bytes(optimizer: torch.optim.Optimizer, but: torch.Tensor | None = None) -> int:
    """Return the bytes of optimizer state on this rank, but for numbers of steps and the state of one parameter."""
    return sum(
        value.nbytes
        for param, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() and param is not but
    )


def law_of_equal_bits(run: Callable[[bool], tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """Register the law that a run ends with the same parameters and state with shard=False and shard=True."""

    @functools.wraps(run)
    def have_equal_bits() -> None:
        found = []
        for shard in (False, True):
            model, optimizer = run(shard)
            found.append((parameters(model), optimizer.state_dict()))
            assert_same_everywhere(model)
        assert_same(found[1], found[0])

    law(have_equal_bits)


for name in MAKERS:

    def run(shard: bool, name: str = name) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = build(MAKERS[name], shard=shard, accumulate=2)
        for _ in range(2):
            train(model, optimizer, range(3), accumulate=2)
            if len(optimizer.param_groups) == 2 and name != "Adagrad":  # torch's own has no state for added ones
                optimizer.add_param_group({"params": [model.added], "lr": 0.03})
        return model, optimizer

    run.__name__ = f"sharded_{name}_steps_have_the_bits_of_unsharded_ones"
    law_of_equal_bits(run)


@law
def each_rank_holds_its_part_of_the_state() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(16)))
    for make in (MAKERS["Adam"], MAKERS["Adagrad"]):
        whole = make(copy.deepcopy(model).parameters())
        nn.Sequential(*model)(torch.ones(1, 24)).sum().backward()
        for param, grad in zip(whole.param_groups[0]["params"], model.parameters(), strict=True):
            param.grad = grad.grad
        whole.step()
        sharded = dd.wrap_optimizer(make(model.parameters()), shard=True)
        model(torch.ones(1, 24)).sum().backward()
        sharded.step()
        assert held_bytes(sharded) <= (1 / dd.size() + 0.05) * held_bytes(whole)
        assert sum(dd.allgather_object(held_bytes(sharded))) == held_bytes(whole)
        sharded.load_state_dict(whole.state_dict())
        assert held_bytes(sharded) <= (1 / dd.size() + 0.05) * held_bytes(whole)


class Lopsided(nn.Module):
    """A kernel that has most of the elements, in another order of memory than that of its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kernel = nn.Parameter(torch.randn(37, 8, 5, 5).to(memory_format=torch.channels_last))
        self.last = nn.Linear(37, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.mean(1, keepdim=True) * self.kernel.square().sum((1, 2, 3)))


@law
def a_parameter_that_is_too_large_for_one_rank_is_cut() -> None:
    for make in (MAKERS["Adagrad"], lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True, amsgrad=True)):
        found, held = [], []
        for shard in (False, True):
            model = Lopsided()
            optimizer = dd.wrap_optimizer(make(model.parameters()), shard=shard, **ORDERED)
            train(model, optimizer, range(3))
            held.append(held_bytes(optimizer))
            state = optimizer.state_dict()
            strides = [value.stride() for value in state["state"][0].values()]
            found.append((parameters(model), state, strides))
            assert_same_everywhere(model)
        assert_same(found[1], found[0])
        assert held[1] <= (1 / dd.size() + 0.01) * held[0]
        assert {*map(id, optimizer.state)} <= {*map(id, model.parameters())}
        optimizer.load_state_dict(found[0][1])
        assert held_bytes(optimizer) == held[1]
        assert_same(optimizer.state_dict(), found[0][1])


@law_of_equal_bits
def a_step_that_raised_leaves_cut_parameters_as_they_were(shard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Lopsided()
    optimizer = dd.wrap_optimizer(MAKERS["SGD"](model.parameters()), shard=shard, **ORDERED)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = "high"
    loss_of(model, dd.rank()).backward()
    raises(TypeError, optimizer.step)
    optimizer.param_groups[0]["lr"] = 0.1
    loss_of(model, dd.rank()).backward()
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, model.parameters())]
    optimizer.step()
    return model, optimizer


@law
def large_parameters_are_sent_in_pieces_also_after_they_moved() -> None:
    params = [nn.Parameter(torch.ones(size)) for size in (1_500_001, 7, 300_000, 0)]
    optimizer = dd.wrap_optimizer(torch.optim.SGD(params, lr=1.0), shard=True)
    for step in range(1, 4):
        optimizer.zero_grad()
        sum((param * torch.arange(len(param))).sum() for param in params).backward()
        optimizer.step()
        for param in params:
            assert torch.equal(param, 1.0 - step * torch.arange(len(param)))
            param.data = param.data.clone()


@law
def a_full_state_moves_between_sharded_and_unsharded_runs() -> None:
    for before, after in ((True, False), (False, True), (True, True)):
        for make in (MAKERS["SGD"], MAKERS["AdamW"], MAKERS["Adagrad"]):
            found = []
            for first, second in ((before, after), (False, False)):
                model, optimizer = build(make, shard=first)
                train(model, optimizer, range(3))
                state = optimizer.state_dict()
                resumed, optimizer = build(make, shard=second)
                resumed.load_state_dict(model.state_dict())
                optimizer.load_state_dict(state)
                train(resumed, optimizer, range(3, 6))
                found.append((parameters(resumed), optimizer.state_dict()))
            assert_same(*found)


@law
def a_checkpoint_of_all_ranks_resumes_sharded_on_fewer() -> None:
    """With the bits of a run that was never sharded."""
    half = [*range((dd.size() + 1) // 2)]
    group = dd.new_group(half)
    found = []
    for shard in (False, True):
        with folder() as path:
            model, optimizer = build(MAKERS["AdamW"], shard=shard)
            train(model, optimizer, range(3))
            dd.save_checkpoint(path, model=model, optimizer=optimizer)
            model, resumed = unwrapped(MAKERS["AdamW"])
            assert dd.load_checkpoint(path, model=model, optimizer=resumed) is not None
            if group.is_member:
                dd.wrap_optimizer(resumed, shard=shard, group=group, **ORDERED)
                train(model, resumed, range(3, 6))
                found.append((parameters(model), resumed.state_dict()))
    if group.is_member:
        assert_same(found[1], found[0])
    dd.remove_group(group)


@law
def a_checkpoint_is_loaded_into_a_sharded_optimizer() -> None:
    """Its parts are on their ranks, and what a refused file had changed is undone."""
    with folder() as path:
        model, optimizer = build(MAKERS["Adam"], shard=True)
        train(model, optimizer, range(3))
        state = optimizer.state_dict()
        saved = copy.deepcopy((model, state))
        dd.save_checkpoint(path, model=model, optimizer=optimizer, async_op=True).wait()
        train(model, optimizer, range(3, 5))
        if dd.size() > 1:
            assert_same(state["state"], saved[1]["state"])  # a copy
        dd.load_checkpoint(path, model=model, optimizer=optimizer)
        assert_same((parameters(model), optimizer.state_dict()), (parameters(saved[0]), saved[1]))
        whole = unwrapped(MAKERS["Adam"])[1]
        whole.load_state_dict(saved[1])
        assert dd.size() == 1 or held_bytes(optimizer) < held_bytes(whole)


class Trace(torch.optim.Adam):
    """A step that calls the base class's, and then moves each parameter that has a gradient."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        trace = self.state[param].setdefault("trace", torch.zeros_like(param))
                        param.sub_(trace.lerp_(param, 0.25), alpha=0.1)
        return loss


@law
def closures_and_steps_of_a_base_class_have_the_same_bits() -> None:
    torch.optim.Adam([nn.Parameter(torch.ones(1))])  # from now on the base's step runs hooks too
    for make in (lambda params: Trace(params, lr=0.01), MAKERS["RMSprop"]):
        for closes in (False, True):
            found, held = [], []
            for shard in (False, True):
                model, optimizer = build(make, shard=shard)
                losses = []
                for step in range(3):
                    closure = closure_of(optimizer, lambda model=model, step=step: loss_of(model, dd.rank(), step))
                    losses.append(optimizer.step(closure) if closes else closure() and optimizer.step())
                held.append(sum(dd.allgather_object(held_bytes(optimizer, but=model.gaps))))
                found.append((losses, parameters(model), optimizer.state_dict()))
            assert_same(found[1], found[0])
            assert held[1] == held[0] // dd.size()  # each element is on one rank, but for the parameter with gaps


@law_of_equal_bits
def an_overflow_on_one_rank_skips_the_step_of_all(shard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(MAKERS["Adam"], shard=shard)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        overflows = step == 1 and dd.rank() == dd.size() - 1
        scaler.scale(loss_of(model, dd.rank(), step) * (torch.inf if overflows else 1)).backward()
        before = [param.clone() for param in model.parameters()]
        if step == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(optimizer_params(optimizer), 0.1)
        scaler.step(optimizer)
        scaler.update()
        assert (step == 1) == all(map(torch.equal, before, model.parameters()))
    assert scaler.get_scale() == 2.0
    return model, optimizer


@law
def hooks_see_all_gradients() -> None:
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), shard=True)
    seen: list[int] = []

    def count(*_: Any) -> None:
        seen.append(sum(param.grad is not None for param in model.parameters()))

    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(count)
    loss_of(model, dd.rank()).backward()
    optimizer.step()
    assert seen == [6, 6]
    count()
    assert seen[-1] == 6


@law
def gradients_are_back_after_a_step_that_raised() -> None:
    class Refusing(torch.optim.SGD):
        refuses = True

        def step(self, closure: Any = None) -> Any:
            if self.refuses:
                raise ValueError("refused")
            return super().step(closure)

    model = net()
    optimizer = dd.wrap_optimizer(Refusing(model.parameters(), lr=0.1), shard=True)
    loss_of(model, dd.rank()).backward()
    gradients = [param.grad for param in model.parameters()]
    raises(ValueError, optimizer.step, "refused")
    optimizer.refuses = False
    optimizer.step()
    assert all(param.grad is grad for param, grad in zip(model.parameters(), gradients, strict=True))
    assert_same_everywhere(model)
    optimizer.refuses = True
    raises(ValueError, optimizer.step, "refused")
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is None or not param.grad.any() for param in model.parameters())
    assert sum(param.grad is not None for param in model.parameters()) == 6


@law_of_equal_bits
def a_parameter_that_is_unfrozen_later_gets_an_owner(shard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(MAKERS["Adam"], shard=shard)
    train(model, optimizer, range(2))
    model.net[2].bias.requires_grad_(True)
    train(model, optimizer, range(2, 4))
    assert sum(dd.allgather_object(model.net[2].bias in optimizer.state)) == (1 if shard else dd.size())
    return model, optimizer


class Prodigy(torch.optim.SGD):
    """The name of an optimizer that takes one step size from all parameters."""


class Averaging(torch.optim.SGD):
    """As the optimizers of the package schedulefree, whose eval() needs the state of every parameter."""

    def eval(self) -> None:
        for param, state in self.state.items():
            param.data.copy_(state["average"])


@law
def what_cannot_be_sharded_is_refused_by_name() -> None:
    model = net()
    for kind in (torch.optim.LBFGS, Prodigy, Averaging):
        wrong = kind(model.parameters())
        raises(UsageError, lambda wrong=wrong: dd.wrap_optimizer(wrong, shard=True), "shard=True", type(wrong).__name__)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(UsageError, lambda: dd.wrap_optimizer(plain, shard=True, op="adasum"), "shard=True", "adasum")
    if dd.size() == 1:
        return
    raises(MismatchError, lambda: dd.wrap_optimizer(plain, shard=dd.rank() == 0), "shard=True", "shard=False")
    table = nn.Embedding(64 * dd.size(), 1, sparse=True)
    nn.init.ones_(table.weight)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), shard=True)
    table(torch.tensor([1])).sum().backward()
    raises(UsageError, optimizer.step, "shard=True", "is sparse")
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), shard=True)
    raises(UsageError, lambda: dd.broadcast_optimizer_state(optimizer), "shard=True", "load a checkpoint")
    call = optimizer.state_dict if dd.rank() == 0 else lambda: dd.allreduce(torch.ones(1), name="other")
    raises(MismatchError, call, "state_dict of a sharded optimizer", "allreduce 'other'")


@law_alone
def state_that_was_divided_in_another_session_is_refused_until_it_is_loaded() -> None:
    backend, is_alone = dd.backend(), dd.size() == 1
    model, optimizer = build(MAKERS["Adam"], shard=True)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    dd.shutdown()
    reopen(backend)
    if not is_alone:
        raises(UsageError, lambda: dd.wrap_optimizer(optimizer, shard=True), "shard=True", "dd.shutdown()")
    optimizer.load_state_dict(state)
    dd.wrap_optimizer(optimizer, shard=True)
    assert_same(optimizer.state_dict(), state)
    dd.shutdown()
    reopen(backend)
    move_to_group([optimizer], dd.new_group([*range(dd.size())]))
    optimizer.zero_grad()
    loss_of(model, dd.rank()).backward()
    if not is_alone:
        raises(UsageError, optimizer.step, "the ranks have changed", "load a checkpoint")
    optimizer.load_state_dict(state)
    optimizer.step()
    assert_same_everywhere(model)


@law_alone
def elastic_state_in_memory_follows_the_ranks() -> None:
    """After other ranks, and from the last commit after a failure."""
    backend = dd.backend()
    model, optimizer = build(MAKERS["Adam"], shard=True)
    state = dd.elastic.State(model=model, optimizer=optimizer)
    state.sync()
    train(model, optimizer, range(2))
    expected = optimizer.state_dict()
    state.commit()
    for has_failed in (False, True):
        if has_failed:
            session.current().world.channel.latch.fail(CollectiveError("a rank was lost"))
            state.restore()
        else:
            state._gather_sharded_state()
        dd.shutdown()
        reopen(backend)
        state._rebind_optimizers()
        state.sync()
        assert_same(optimizer.state_dict(), expected)
        state.save()


@law_alone
def a_rank_that_has_joined_cannot_step() -> None:
    model, optimizer = build(MAKERS["SGD"], shard=True)
    train(model, optimizer, range(1))
    if dd.size() == 1:
        return
    if dd.rank() == dd.size() - 1:
        dd.join()
        return
    optimizer.zero_grad()
    loss_of(model, dd.rank()).backward()
    raises(MismatchError, optimizer.step, "called join")
    dd.join()

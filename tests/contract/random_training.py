"""Train a random model in a random way on all ranks, and compare each step with plain torch on all ranks' batches.

A seed gives the same program on every rank: its layers, of which some ranks may leave some out, the optimizer, the
arguments of dd.wrap_optimizer, hooks of parameters, checkpointed layers, accumulation and clipping. In most programs
one rank does in one step what the others do not: either it is an error on every rank by the next step, or it changes
nothing.
"""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from contract.oracle import assert_same_everywhere, raises
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualdist as dd
from dualdist.errors import CollectiveError, DriftError, MismatchError, NotInitializedError, UsageError

STEPS = 3
# In float64. Other orders of a sum differ by 1e-16; Adam and Adagrad divide by roots that are near 1e-8 at times.
RTOL, ATOL = 1e-6, 1e-8
OPTIMIZERS: Sequence[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = (
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "maximize": True, "foreach": False}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
)


# What one rank does: other options from the start, another learning rate, no step; a backward that raises and is
# run again, a forked child, a copy of the optimizer.
MUST_FAIL: Mapping[str, str] = {"option": "weight_decay of", "rate": "lr of", "skip": "left out a step"}
MAY_FAIL = {**MUST_FAIL, "exception": "the gradients of a backward inside of another"}
APART = (*MAY_FAIL, "fork", "copy")


@dataclass(frozen=True)
class Layer:
    """One layer of the model."""

    kind: str
    width: int
    is_frozen: bool
    is_twice: bool
    reentrant: bool | None  # for torch.utils.checkpoint, if it is called
    skipped_by: frozenset[int]  # ranks whose loss does not use it
    hook: str  # registered with torch before dd.wrap_optimizer, or after it; it halves the gradient of the weight


@dataclass(frozen=True)
class Program:
    """What a seed means."""

    seed: int
    layers: Sequence[Layer]
    optimizer: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    options: dict[str, Any]
    clip: float | None
    width: int
    has_groups: bool
    sets_none: bool
    clears_model: bool
    apart: str  # what only one rank does: APART, or ""
    apart_rank: int
    apart_step: int


def draw(seed: int, size: int) -> Program:
    """Return the program of a seed on so many ranks."""
    rng = random.Random(seed)
    flip = lambda chance=0.5: rng.random() < chance  # noqa: E731
    op, accumulate = rng.choice(("mean", "mean", "sum")), rng.choice((1, 1, 2, 3))
    layers = []
    for number in range(rng.randint(1, 6)):
        skipped = frozenset(rank for rank in range(size) if flip(0.3)) if flip(0.3) else frozenset()
        layers.append(
            Layer(
                kind=rng.choice(("linear", "linear", "norm", "residual")),
                width=rng.choice((3, 8, 40)),
                is_frozen=number > 0 and flip(0.15),
                is_twice=flip(0.2),
                # A layer that is entered again has a backward of its own, which all ranks must run.
                reentrant=rng.choice((None, None, False) if skipped else (None, None, False, True)),
                skipped_by=skipped,
                hook=rng.choice(("", "", "", "before", "after", "tensor")),
            )
        )
    if accumulate > 1 and any(layer.reentrant for layer in layers):
        # That backward counts, and the reduction comes before the last one: what a hook halves later is the mean.
        layers = [replace(layer, hook="") if layer.skipped_by else layer for layer in layers]
    optimizer, arguments = rng.choice(OPTIMIZERS)
    apart = ("", *APART)[seed % (1 + len(APART))] if size > 1 else ""
    cap = rng.choice((0.0005, 0.01, 25))
    options = {"op": op, "accumulate": accumulate, "bucket_cap_mb": cap}
    options |= {"first_bucket_mb": rng.choice((cap, 0.0005)), "gradient_as_bucket_view": flip(0.7)}
    options |= {"gradient_predivide_factor": 2.0} if flip(0.2) else {}
    options |= {"check_every": 2} if flip(0.2) else {}
    options |= {"check_every": 1} if apart == "rate" else {}
    return Program(
        seed=seed,
        layers=layers,
        optimizer=optimizer,
        arguments=arguments,
        options=options,
        clip=None if apart == "exception" else rng.choice((None, None, 0.1)),  # of gradients that are not reduced
        width=rng.choice((4, 16)),
        has_groups=flip(),
        sets_none=flip(0.7),
        clears_model=flip(0.3),
        apart=apart,
        apart_rank=rng.randrange(size),
        apart_step=0 if apart == "option" else rng.randrange(STEPS - 1),
    )


class Block(nn.Module):
    """One layer, which keeps the width of its input."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__()
        self.layer = layer
        inner = nn.LayerNorm(width) if layer.kind == "norm" else nn.Linear(width, layer.width)
        self.inner, self.back = inner, None if layer.kind == "norm" else nn.Linear(layer.width, width)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) if self.back is None else self.back(torch.tanh(self.inner(x)))
        return x + y if self.layer.kind == "residual" else y

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        if rank in self.layer.skipped_by:
            return x
        for _ in range(1 + self.layer.is_twice):
            if self.layer.reentrant is None:
                x = self.compute(x)
            else:
                x = checkpoint(self.compute, x, use_reentrant=self.layer.reentrant)
        return x


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first = nn.Linear(5, program.width)
        self.blocks = nn.ModuleList(Block(layer, program.width) for layer in program.layers)
        self.unused = nn.Parameter(torch.ones(3))
        for block, layer in zip(self.blocks, program.layers, strict=True):
            block.requires_grad_(not layer.is_frozen)

    def loss(self, rank: int, seed: int) -> torch.Tensor:
        """Return the loss of one rank's batch; seeds differ between steps."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        x = self.first(torch.randn(6, 5, generator=generator, dtype=torch.float64))
        for block in self.blocks:
            x = block(x, rank)
        return x.square().mean() + x.sum() / 10


def halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def register_hooks(model: Model, program: Program, when: Sequence[str]) -> None:
    for block, layer in zip(model.blocks, program.layers, strict=True):
        weight = block.inner.weight
        if layer.hook not in when or layer.is_frozen:
            continue
        if layer.hook == "tensor":
            weight.register_hook(lambda grad: grad * 0.5)
        else:
            weight.register_post_accumulate_grad_hook(halve)


def make_optimizer(model: Model, program: Program) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}] if program.has_groups else params
    return program.optimizer(groups, **program.arguments)


def clear(optimizer: torch.optim.Optimizer, model: Model, program: Program) -> None:
    (model if program.clears_model else optimizer).zero_grad(set_to_none=program.sets_none)


def backwards(model: Model, program: Program, rank: int, step: int) -> None:
    times = program.options["accumulate"]
    for number in range(times):
        (model.loss(rank, times * step + number) / times).backward()


def reduced(grads: Sequence[torch.Tensor | None], op: str) -> torch.Tensor | None:
    """Return the reduction of one parameter's gradients, of which ranks that did not use it have none."""
    found = [grad for grad in grads if grad is not None]
    if not found:
        return None
    return torch.stack(found).sum(0) / (len(grads) if op == "mean" else 1)


class Alone:
    """The same training by plain torch: a copy of the model for each rank, whose gradients are added up here."""

    def __init__(self, model: Model, program: Program) -> None:
        self.models = [copy.deepcopy(model) for _ in range(dd.size())]
        for one in self.models:
            register_hooks(one, program, ("before", "after", "tensor"))
        self.optimizer = make_optimizer(self.models[0], program)
        self.program = program

    def backwards(self, step: int) -> list[torch.Tensor | None]:
        """Return the gradients of a step, and set them on the first copy."""
        parts = []
        for rank, one in enumerate(self.models):
            one.load_state_dict(self.models[0].state_dict())
            one.zero_grad(set_to_none=self.program.sets_none or step == 0)
            backwards(one, self.program, rank, step)
            parts.append([param.grad for param in one.parameters()])
        grads = [reduced(each, self.program.options["op"]) for each in zip(*parts, strict=True)]
        for param, grad in zip(self.models[0].parameters(), grads, strict=True):
            param.grad = grad
        return grads


def compare(program: Program, what: str, found: Sequence[Any], expected: Sequence[Any], names: Sequence[str]) -> None:
    for name, mine, right in zip(names, found, expected, strict=True):
        assert (mine is None) == (right is None), f"{what} of {name}: {mine} instead of {right}: {program}"
        if mine is not None:
            text: Callable[[str], str] = lambda said, name=name: f"{what} of {name}: {said}\n{program}"  # noqa: E731
            torch.testing.assert_close(mine.detach(), right.detach(), rtol=RTOL, atol=ATOL, msg=text)


class OwnError(Exception):
    """Of the program, on one rank."""


def use_child() -> None:
    """Let a child reduce, as a library might that forks; it must be told that it is no rank."""
    child = os.fork()
    if not child:
        try:
            dd.allreduce(torch.full((2,), 100.0))
        except NotInitializedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def use_copy(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Let a copy step, which must be refused, and compute gradients that are not reduced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of hooks that it does not copy
        other, steps = copy.deepcopy((model, optimizer))
    other.loss(0, 0).backward()
    raises(UsageError, steps.step, "a copy of one that dd.wrap_optimizer wrapped")


class Apart:
    """What one rank does in one step, as the program says, and the others do not."""

    def __init__(self, program: Program, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self._program, self._model, self._optimizer = program, model, optimizer
        self._is_mine = dd.rank() == program.apart_rank
        self._must_raise = False
        if self._is_mine and program.apart == "option":
            optimizer.param_groups[0]["weight_decay"] += 0.125
        if self._is_mine and program.apart == "exception":
            model.first.weight.register_hook(self._raise)

    def _raise(self, grad: torch.Tensor) -> None:
        if self._must_raise:
            self._must_raise = False
            raise OwnError

    def begin(self, step: int) -> None:
        if not self._is_mine or step != self._program.apart_step:
            return
        self._must_raise = True
        if self._program.apart == "fork":
            use_child()
        elif self._program.apart == "copy":
            use_copy(self._model, self._optimizer)
        elif self._program.apart == "rate":
            self._optimizer.param_groups[-1]["lr"] *= 2

    def backwards(self, step: int) -> None:
        """Compute gradients, again after the program's own exception."""
        for _ in range(2):
            clear(self._optimizer, self._model, self._program)
            try:
                return backwards(self._model, self._program, dd.rank(), step)
            except OwnError:
                pass

    def step(self, step: int) -> None:
        if not (self._program.apart == "skip" and self._is_mine and step == self._program.apart_step):
            self._optimizer.step()

    def is_right(self, step: int, *, after_step: bool) -> bool:
        """Return True if numbers are those of one process; the others end in an error."""
        if self._program.apart == "exception" and step == self._program.apart_step:
            return after_step  # until then the other ranks' gradients are their own
        return self._program.apart not in MUST_FAIL or step < self._program.apart_step


def train(seed: int) -> None:
    """Train the program of this seed by dualdist, and compare gradients and parameters of every step."""
    program = draw(seed, dd.size())
    try:
        train_program(program)
    except (CollectiveError, DriftError, MismatchError) as error:
        if program.apart not in MAY_FAIL or MAY_FAIL[program.apart] not in str(error):
            raise
        dd.shutdown()
    except UsageError as error:  # where the backward of a layer that is entered again would be summed twice
        is_entered_again = any(layer.reentrant for layer in program.layers)
        if program.options["op"] != "sum" or not is_entered_again or "use_reentrant=False" not in str(error):
            raise
        dd.shutdown()


def train_program(program: Program) -> None:
    torch.manual_seed(program.seed)
    model = Model(program).double()
    names = [name for name, _ in model.named_parameters()]
    alone = Alone(model, program)
    register_hooks(model, program, ("before", "tensor"))
    optimizer = make_optimizer(model, program)
    apart = Apart(program, model, optimizer)
    dd.wrap_optimizer(optimizer, **program.options)
    register_hooks(model, program, ("after",))
    for step in range(STEPS):
        apart.begin(step)
        apart.backwards(step)
        expected = alone.backwards(step)
        if apart.is_right(step, after_step=False):
            compare(program, f"step {step}: gradient", [param.grad for param in model.parameters()], expected, names)
        for one in (model, alone.models[0]):
            if program.clip is not None:
                nn.utils.clip_grad_norm_(one.parameters(), program.clip)
        apart.step(step)
        alone.optimizer.step()
        if apart.is_right(step, after_step=True):
            compare(program, f"step {step}: value", list(model.parameters()), list(alone.models[0].parameters()), names)
    assert program.apart not in MUST_FAIL, f"no error: {program}"
    assert_same_everywhere(model)

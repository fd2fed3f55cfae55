"""Register an optimizer's parameters for reduction: gradient hooks, ownership, and assignment to buckets.

Note [ownership]: the optimizer owns its reducer, and a hook refers to it weakly: when the optimizer is deleted, its
parameters' gradients are reduced no more. Nothing here refers to the optimizer, so that this happens at once, on every
rank alike, and not when the garbage collector runs.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from dualdist.backends.control_plane import check_same_tensors
from dualdist.collectives.broadcast_state import named_optimizer_params, optimizer_params
from dualdist.collectives.consistency import Options, digest, named_state, options_of
from dualdist.collectives.group import Group
from dualdist.collectives.tensor_utils import check_tensor
from dualdist.ddp.bucket import Bucket, BucketStrategy
from dualdist.ddp.config import ReducerConfig
from dualdist.ddp.layout import BucketLayout, dense_strides, plan_buckets
from dualdist.ddp.packer import GradientOwner, create_packer, is_view_of, owner_of
from dualdist.ddp.reduction_plan import DueFlags, ReductionPlan, active_plans
from dualdist.engine.channel import Channel
from dualdist.errors import UnsupportedError, UsageError
from dualdist.utils import accelerator

REQUIRES_GRAD = operator.attrgetter("requires_grad")
Errors = Callable[[], contextlib.AbstractContextManager[Any]]


class ParamSource:
    """The parameters and options of an optimizer, none once it was deleted: Note [ownership]."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, has_all_state: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._has_all_state = has_all_state

    def params(self) -> list[torch.Tensor]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer_params(optimizer)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return named_optimizer_params(self._optimizer(), self._names)

    def options(self) -> Options:
        """Return the optimizer's options, and a digest of its state if this rank has all of it."""
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        options = options_of(optimizer, has_all_state=self._has_all_state)
        state = [tensor for _, tensor in named_state(optimizer)] if self._has_all_state else []
        return {**options, "the digest of the optimizer's state": digest(state)[:12]} if state else options


class ParamRegistry:
    """The parameters of one optimizer, numbered in the order of registration, and the buckets they are assigned to.

    All ranks register the same parameters, in the order of the first rank. `owner` is the reducer of the gradients.
    """

    def __init__(
        self,
        owner: GradientOwner,
        group: Group,
        source: ParamSource,
        config: ReducerConfig,
        strategy: type[BucketStrategy],
        fused_groups: Sequence[Sequence[torch.Tensor]],
        errors: Errors,
    ) -> None:
        self.source = source
        self.config = config
        self.fused_groups = fused_groups
        self.errors = errors
        self.packer = create_packer(owner)
        self._owner = weakref.ref(owner)
        self._strategy = strategy
        self._carried: dict[str, Any] | None = None  # the strategy's state in the group before
        self._enter(group)

    def move_to_group(self, group: Group) -> None:
        """Begin in another group, with no parameters registered."""
        self._carried = self.export_state()
        self.packer.detach()
        self._enter(group)

    def _enter(self, group: Group) -> None:
        self.group = group
        self.channel: Channel = group.gradients
        self.name = group.next_name("gradients")
        self._known_params: list[torch.Tensor] = []  # at the last update()
        self._known_requires_grad: list[bool] = []
        self.owned: list[torch.Tensor | None] = []  # by number; None if another reducer has taken the parameter
        self._numbers: dict[int, int] = {}  # by id of the parameter
        self.buckets: list[Bucket] = []
        self._num_layouts = 1
        self.is_on_accelerator = False
        self.number = len(group.reducers)  # by the order in which every rank created them
        self.plan = ReductionPlan(self._strategy(self.config), self._owner)
        group.reducers.append(self.plan)

    def detach(self) -> None:
        """Stop reducing gradients."""
        self.packer.detach()
        self.plan.retire()
        self.buckets.clear()
        if self.group.reducers[-1] is self.plan:
            self.group.reducers.pop()  # so that its successor is not one of several

    def update(self, accumulate: int) -> None:
        """Register parameters that were added or unfrozen since the last call; every rank calls this."""
        params = self.source.params()
        requires_grad = list(map(REQUIRES_GRAD, params))
        if requires_grad == self._known_requires_grad and all(map(operator.is_, self._known_params, params)):
            return
        self._known_params, self._known_requires_grad = params, requires_grad
        kept = {id(param) for param in params}
        for param in [owned for owned in self.owned if owned is not None and id(owned) not in kept]:
            self.give_up(param)
        new = [(name, param) for name, param in self.source.named() if self._is_unowned(param)]
        if new:
            self._register_params(new, accumulate)

    def _register_params(self, new: Sequence[tuple[str, torch.Tensor]], accumulate: int) -> None:
        refusal: UsageError | UnsupportedError | None = None  # raised once all ranks know
        try:
            for name, param in new:
                _check_param(name, param)
        except (UsageError, UnsupportedError) as error:
            refusal, new = error, []
        start = len(self.owned)
        numbers = {id(param): number for number, (_, param) in enumerate(new, start)}
        fused = [[numbers[id(param)] for param in group if id(param) in numbers] for group in self.fused_groups]
        description = f"{self.config.description} accumulate={accumulate}" + (f" groups={fused}" if fused else "")
        signatures = [(name if p.is_contiguous() else f"{name} strides {p.stride()}", p) for name, p in new]
        # Others are known by their place in the optimizer, too, or in a checkpoint of what was not sent.
        any_order = not (fused or self.config.shard or self.plan.strategy.has_state)
        with self.errors():
            order = self.channel.run(
                f"check of the parameters of {self.name}",
                lambda backend: check_same_tensors(
                    backend, signatures, 0, f"{self.name}.check", description, any_order=any_order, refusal=refusal
                ),
            )
            if len(active_plans(self.group)) > 1:
                DueFlags(self.group).wait()  # retires those that no rank has any more
        new = [new[place] for place in order]  # as on the first rank
        numbers = {id(param): number for number, (_, param) in enumerate(new, start)}
        self._numbers.update(numbers)
        self.owned.extend(param for _, param in new)
        for _, param in new:
            self._take_ownership(param, numbers[id(param)])
        params = self.all_params
        # Autograd finishes the last layers first.
        for members in plan_buckets(params, range(len(params) - 1, start - 1, -1), self.config, fused):
            self._add_bucket(members, params)
        if self._carried is not None:
            self.load_state(self._carried)
            self._carried = None
        with self.errors():  # a rank that is new in the group has made no reduction yet
            self.plan.strategy.agree(self.channel, f"{self.name}.reductions")

    def export_state(self) -> dict[str, Any] | None:
        """Return the strategy's state by the position of the parameter; it shares memory."""
        return self.plan.strategy.export([self._number_of(each) for each in self.source.params()])

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Replace the strategy's state by what export_state() returned; None for nothing."""
        params = self.source.params()
        self.plan.strategy.load(state, params, [self._number_of(each) for each in params])

    @property
    def all_params(self) -> list[torch.Tensor]:
        """The registered parameters; for one that another reducer has taken an uninitialized tensor of its shape."""
        params = list(self.owned)
        for layout in self.plan.layouts:
            for number, shape in zip(layout.numbers, layout.shapes, strict=True):
                if params[number] is None:
                    params[number] = torch.empty(shape, dtype=layout.dtype, device=layout.device)
        return [param for param in params if param is not None]

    def owned_params(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are reduced here, in the order of registration on every rank."""
        return [param for param in self.owned if param is not None]

    def tensors_in_order(self) -> list[tuple[str, torch.Tensor]]:
        """Return the optimizer's parameters with their names, in the same order on every rank."""
        end = len(self.owned)
        return sorted(self.source.named(), key=lambda pair: (self._numbers.get(id(pair[1]), end), pair[0]))

    def members(self, bucket: Bucket) -> list[torch.Tensor | None]:
        """Return the parameters of a bucket; None for one that another reducer has taken."""
        return [self.owned[number] for number in bucket.layout.numbers]

    def _is_unowned(self, param: torch.Tensor) -> bool:
        """Return True if the parameter requires a gradient that neither this nor a newer reducer reduces."""
        if not param.requires_grad or self._number_of(param) is not None:
            return False
        owner = owner_of(param)
        return owner is None or owner.group is not self.group or owner.number <= self.number

    def _number_of(self, param: torch.Tensor) -> int | None:
        number = self._numbers.get(id(param))
        return number if number is not None and self.owned[number] is param else None

    def _take_ownership(self, param: torch.Tensor, number: int) -> None:
        """Reduce the gradients of a parameter; an older reducer of it stops."""
        former = owner_of(param)
        if former is not None and former is not self._owner():
            former.give_up(param)
        self.packer.watch(param, number)

    def give_up(self, param: torch.Tensor) -> None:
        """Leave a parameter to another reducer."""
        number = self._number_of(param)
        if number is not None:
            self.owned[number] = None
            del self._numbers[id(param)]
            self.packer.forget(number)

    def _add_bucket(
        self, members: tuple[int, ...], all_params: Sequence[torch.Tensor], unbucketed: AbstractSet[int] = frozenset()
    ) -> None:
        bucket_index, params = len(self.buckets), [all_params[number] for number in members]
        dtype, device = params[0].dtype, params[0].device
        self.is_on_accelerator |= accelerator.is_accelerator(device)
        if not self.plan.strategy.sends_gradients:
            unbucketed = frozenset(members)
        layout = BucketLayout(
            f"{self.name}.{self._num_layouts}.{bucket_index}",
            tuple(param.shape for param in params),
            tuple(dense_strides(param) for param in params),
            dtype,
            device,
            frozenset(n for n, number in enumerate(members) if number in unbucketed),
            members,
        )
        self.plan.layouts.append(layout)
        bucket = self.plan.make_bucket(bucket_index, self.channel)
        self.buckets.append(bucket)
        self.packer.set_bucket(bucket_index, members, bucket.views, bucket.scale)

    def rebuild_buckets(self, order: Sequence[int]) -> None:
        """Assign the parameters to new buckets in the order in which their gradients become ready."""
        self._num_layouts += 1
        params = self.all_params
        all_members = plan_buckets(params, order, self.config)
        if all_members == [layout.numbers for layout in self.plan.layouts]:
            return
        unbucketed = {layout.numbers[index] for layout in self.plan.layouts for index in layout.unbucketed}
        self.buckets.clear()
        self.plan.clear()
        self.packer.clear_buckets()
        for members in all_members:
            self._add_bucket(members, params, unbucketed)

    def places(self, buckets: Sequence[Bucket]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameters whose gradients have a place in the buckets, each with that place."""
        for bucket in buckets:
            for view, number in zip(bucket.views, bucket.layout.numbers, strict=True):
                param = self.owned[number]
                if param is not None and view is not None:
                    yield param, view

    def keep_grads(self) -> None:
        """Copy gradients that are views of the buckets out of them."""
        for param, view in self.places(self.buckets):
            if is_view_of(param.grad, view):
                param.grad = view.clone()

    def planned_order(self) -> list[int]:
        """Return the parameters' numbers in bucket order."""
        return [number for layout in self.plan.layouts for number in layout.numbers]

    @property
    def order(self) -> list[int] | None:
        """The parameters' numbers in bucket order, once the buckets have been rebuilt."""
        return self.planned_order() if self._num_layouts > 1 else None

    @property
    def has_fixed_order(self) -> bool:
        """True if the buckets stay in the order of registration."""
        return bool(self.fused_groups) or not self.plan.strategy.sends_gradients

    def replace_buckets(self) -> None:
        """Replace the buckets whose layout has changed."""
        for index, bucket in enumerate(self.buckets):
            if bucket.layout is not self.plan.layouts[index]:
                bucket = self.buckets[index] = self.plan.make_bucket(index, self.channel)
                self.packer.set_bucket(index, bucket.layout.numbers, bucket.views, bucket.scale)


def _check_param(name: str, param: torch.Tensor) -> None:
    """Raise UsageError or UnsupportedError unless gradients of the parameter can be reduced."""
    if hasattr(param, "placements"):
        raise UnsupportedError(
            f"parameter {name} is a DTensor: FSDP and tensor parallelism reduce its gradient themselves, so leave this "
            "optimizer unwrapped"
        )
    check_tensor(param, f"parameter {name}")
    if getattr(param, "grad_dtype", None) not in (None, param.dtype):
        raise UnsupportedError(f"parameter {name} has gradients of {param.grad_dtype}, not of its own dtype")

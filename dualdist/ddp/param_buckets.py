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
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dualdist.backends.control_plane import check_same_tensors
from dualdist.collectives.consistency import Options
from dualdist.collectives.tensor_utils import check_tensor
from dualdist.ddp.bucket_plan import BucketPlan, ReducerConfig, dense_strides, plan_buckets
from dualdist.ddp.gradient_packer import is_view_of, owner_of
from dualdist.ddp.reduction_plan import ReductionPlan, retire_unused
from dualdist.errors import NotInitializedError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from dualdist.collectives.group import Group
    from dualdist.ddp.buckets import Bucket
    from dualdist.ddp.gradient_packer import GradientPacker
    from dualdist.engine.channel import Channel

REQUIRES_GRAD = operator.attrgetter("requires_grad")
Errors = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(eq=False, repr=False)
class ParamBuckets:
    """The parameters of one optimizer, numbered in the order of registration, and the buckets they are assigned to.

    All ranks register the same parameters, in the order of the first rank. If the group has been closed, `next_group`
    returns the one that replaces it, or raises. Errors of collectives are raised within the context of `errors`.
    """

    group: Group
    parameters: Callable[[], Sequence[torch.Tensor]]
    named_parameters: Callable[[], Sequence[tuple[str, torch.Tensor]]]
    options: Callable[[], Options]
    config: ReducerConfig
    accumulate: int
    _: KW_ONLY
    fused_groups: Sequence[Sequence[torch.Tensor]] = ()
    next_group: Callable[[], Group] | None = None
    errors: Errors = contextlib.nullcontext
    packer: GradientPacker = field(init=False)

    def __post_init__(self) -> None:
        self._carried: dict[str, Any] | None = None  # what was not sent in the group before
        self._enter(self.group)

    def _enter(self, group: Group) -> None:
        """Begin in a group, with no parameters registered."""
        if hasattr(self, "_plan"):
            self._carried = self.export_feedback()
        self.group = group
        self._channel: Channel = group.gradients
        self.name = group.next_name("gradients")
        self.packer.detach()
        self._known_params: list[torch.Tensor] = []  # at the last update()
        self._known_requires_grad: list[bool] = []
        self._owned: list[torch.Tensor | None] = []  # by number; None if another reducer has taken the parameter
        self._numbers: dict[int, int] = {}  # by id of the parameter
        self._buckets: list[Bucket] = []
        self._num_layouts = 1
        self._uses_cuda = False
        self.number = len(group.reducers)  # by the order in which every rank created them
        self._plan = ReductionPlan(self.config, weakref.ref(self))
        group.reducers.append(self._plan)

    def move_to_group(self, group: Group) -> None:
        """Reduce in another group; every rank of it calls this or creates a reducer. `next_group` takes precedence."""
        self._enter(group if self.next_group is None else self.next_group())
        self.update()

    def detach(self) -> None:
        """Stop reducing gradients."""
        self.packer.detach()
        self._plan.retire()
        self._buckets.clear()
        if self.group.reducers[-1] is self._plan:
            self.group.reducers.pop()  # so that its successor is not one of several

    def update(self) -> None:
        """Register parameters that were added or unfrozen since the last call; every rank calls this.

        Raises:
            MismatchError: the ranks' parameters or configurations differ; raised on every rank.
        """
        self._require_open()
        params = list(self.parameters())
        requires_grad = list(map(REQUIRES_GRAD, params))
        if requires_grad == self._known_requires_grad and all(map(operator.is_, self._known_params, params)):
            return
        self._known_params, self._known_requires_grad = params, requires_grad
        kept = {id(param) for param in params}
        for param in [owned for owned in self._owned if owned is not None and id(owned) not in kept]:
            self._give_up(param)
        new = [(name, param) for name, param in self.named_parameters() if self._is_unowned(param)]
        if new:
            self._register_params(new)

    def _register_params(self, new: Sequence[tuple[str, torch.Tensor]]) -> None:
        refusal: UsageError | UnsupportedError | None = None  # raised once all ranks know
        try:
            for name, param in new:
                _check_param(name, param)
        except (UsageError, UnsupportedError) as error:
            refusal, new = error, []
        start = len(self._owned)
        numbers = {id(param): number for number, (_, param) in enumerate(new, start)}
        fused = [[numbers[id(param)] for param in group if id(param) in numbers] for group in self.fused_groups]
        description = f"{self.config.description} accumulate={self.accumulate}" + (f" groups={fused}" if fused else "")
        signatures = [(name if p.is_contiguous() else f"{name} strides {p.stride()}", p) for name, p in new]
        # Others are known by their place in the optimizer, too, or in a checkpoint of what was not sent.
        any_order = not (fused or self.config.shard or self._plan.feedback)
        with self.errors():
            order = self._channel.run(
                f"check of the parameters of {self.name}",
                lambda backend: check_same_tensors(
                    backend, signatures, 0, f"{self.name}.check", description, any_order=any_order, refusal=refusal
                ),
            )
            retire_unused(self.group)
        new = [new[place] for place in order]  # as on the first rank
        numbers = {id(param): number for number, (_, param) in enumerate(new, start)}
        self._numbers.update(numbers)
        self._owned.extend(param for _, param in new)
        for _, param in new:
            self._take_ownership(param, numbers[id(param)])
        params = self.params
        # Autograd finishes the last layers first.
        for members in plan_buckets(params, range(len(params) - 1, start - 1, -1), self.config, fused):
            self._add_bucket(members, params)
        if self._plan.feedback is not None:
            if self._carried is not None:
                self.load_feedback(self._carried)
                self._carried = None
            with self.errors():  # a rank that is new in the group has made no reduction yet
                self._plan.feedback.agree(self._channel, f"{self.name}.reductions")

    def export_feedback(self) -> dict[str, Any] | None:
        """Return what this rank has not sent yet, by the position of the parameter; it shares memory."""
        feedback = self._plan.feedback
        return None if feedback is None else feedback.export([self._number_of(each) for each in self.parameters()])

    def load_feedback(self, state: Mapping[str, Any] | None) -> None:
        """Replace what this rank has not sent yet by what export_feedback() returned; None for nothing."""
        params = list(self.parameters())
        if self._plan.feedback is not None:
            self._plan.feedback.load(state, params, [self._number_of(each) for each in params])

    @property
    def params(self) -> list[torch.Tensor]:
        """The registered parameters; for one that another reducer has taken an uninitialized tensor of its shape."""
        params = list(self._owned)
        for plan in self._plan.buckets:
            for number, shape in zip(plan.numbers, plan.shapes, strict=True):
                if params[number] is None:
                    params[number] = torch.empty(shape, dtype=plan.dtype, device=plan.device)
        return [param for param in params if param is not None]

    def registered_params(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are reduced here, in the order of registration on every rank."""
        return [param for param in self._owned if param is not None]

    def tensors_in_order(self) -> list[tuple[str, torch.Tensor]]:
        """Return the optimizer's parameters with their names, in the same order on every rank."""
        end = len(self._owned)
        return sorted(self.named_parameters(), key=lambda pair: (self._numbers.get(id(pair[1]), end), pair[0]))

    def parameter(self, number: int) -> torch.Tensor | None:
        """Return the parameter of this number, unless another reducer has taken it."""
        return self._owned[number]

    def _is_unowned(self, param: torch.Tensor) -> bool:
        """Return True if the parameter requires a gradient that neither this nor a newer reducer reduces."""
        if not param.requires_grad or self._number_of(param) is not None:
            return False
        owner = owner_of(param)
        return owner in (None, self) or owner.group is not self.group or owner.number < self.number

    def _number_of(self, param: torch.Tensor) -> int | None:
        number = self._numbers.get(id(param))
        return number if number is not None and self._owned[number] is param else None

    def _take_ownership(self, param: torch.Tensor, number: int) -> None:
        """Reduce the gradients of a parameter; an older reducer of it stops."""
        former = owner_of(param)
        if former is not None and former is not self:
            former._give_up(param)
        self.packer.watch(param, number)

    def _give_up(self, param: torch.Tensor) -> None:
        number = self._number_of(param)
        if number is not None:
            self._owned[number] = None
            del self._numbers[id(param)]
            self.packer.forget(number)

    def _add_bucket(
        self, members: tuple[int, ...], all_params: Sequence[torch.Tensor], unbucketed: AbstractSet[int] = frozenset()
    ) -> None:
        bucket_index, params = len(self._buckets), [all_params[number] for number in members]
        dtype, device = params[0].dtype, params[0].device
        self._uses_cuda |= device.type == "cuda"
        if self.config.op == "adasum":  # a bucket carries flags instead of gradients
            unbucketed = frozenset(members)
        plan = BucketPlan(
            f"{self.name}.{self._num_layouts}.{bucket_index}",
            tuple(param.shape for param in params),
            tuple(dense_strides(param) for param in params),
            dtype,
            device,
            frozenset(n for n, number in enumerate(members) if number in unbucketed),
            members,
        )
        self._plan.buckets.append(plan)
        bucket = self._plan.make_bucket(bucket_index, self._channel)
        self._buckets.append(bucket)
        self.packer.set_bucket(bucket_index, members, bucket.views, bucket.scale)

    def _rebuild_buckets(self, order: Sequence[int]) -> None:
        """Assign the parameters to new buckets in the order in which their gradients become ready."""
        self._num_layouts += 1
        params = self.params
        all_members = plan_buckets(params, order, self.config)
        if all_members == [plan.numbers for plan in self._plan.buckets]:
            return
        unbucketed = {plan.numbers[index] for plan in self._plan.buckets for index in plan.unbucketed}
        self._buckets.clear()
        self._plan.clear()
        self.packer.clear_buckets()
        for members in all_members:
            self._add_bucket(members, params, unbucketed)

    def _places(self, buckets: Sequence[Bucket]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameters whose gradients have a place in the buckets, each with that place."""
        for bucket in buckets:
            for view, number in zip(bucket.views, bucket.plan.numbers, strict=True):
                param = self._owned[number]
                if param is not None and view is not None:
                    yield param, view

    def keep_grads(self) -> None:
        """Copy gradients that are views of the buckets out of them."""
        for param, view in self._places(self._buckets):
            if is_view_of(param.grad, view):
                param.grad = view.clone()

    def planned_order(self) -> list[int]:
        """Return the parameters' numbers in bucket order."""
        return [number for plan in self._plan.buckets for number in plan.numbers]

    @property
    def order(self) -> list[int] | None:
        """The parameters' numbers in bucket order, once the buckets have been rebuilt."""
        return self.planned_order() if self._num_layouts > 1 else None

    def _require_open(self) -> None:
        if self.group.is_open:
            return
        if self.next_group is None:
            raise NotInitializedError(
                "this optimizer reduced gradients in a group that dd.shutdown() or dd.remove_group() has closed: call "
                "dd.wrap_optimizer again"
            )
        self._enter(self.next_group())


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

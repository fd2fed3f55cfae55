"""Register an optimizer's parameters for reduction: gradient hooks, ownership, and assignment to buckets.

Note [ownership]: a parameter refers to its hook, and the hook to the reducer: gradients are reduced for as long as
there are any, on every rank alike, even if the optimizer was deleted. Python's garbage collector does not see a
parameter's hooks, so nothing that a reducer refers to may refer to a parameter: else a deleted model would leak.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dualdist.backends.base import UNRESERVED
from dualdist.backends.control_plane import check_same_tensors
from dualdist.ddp.bucket_plan import BucketPlan, ReducerConfig, dense_strides, plan_buckets, wire_dtype
from dualdist.ddp.reduction_plan import ReductionPlan, retire_unused
from dualdist.errors import NotInitializedError, UnsupportedError

if TYPE_CHECKING:
    from dualdist.backends.base import Backend
    from dualdist.collectives.group import Group
    from dualdist.ddp.buckets import Bucket

Errors = Callable[[], contextlib.AbstractContextManager[Any]]


class GradHook:
    """A post-accumulate-grad hook that passes a parameter and its number to the parameter's reducer."""

    __slots__ = ("_number", "reducer")

    def __init__(self, reducer: ParamBuckets, number: int) -> None:
        self.reducer = reducer
        self._number = number

    def __call__(self, param: torch.Tensor) -> None:
        self.reducer.on_grad_ready(param, self._number)


def owner_of(param: torch.Tensor) -> ParamBuckets | None:
    """Return the reducer of a parameter's gradients."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return next((hook.reducer for hook in hooks if isinstance(hook, GradHook)), None)


def remove_hooks(param: torch.Tensor, reducer: ParamBuckets | None = None) -> None:
    """Remove the hooks of this reducer, or of any if None."""
    hooks = param._post_accumulate_grad_hooks or {}
    for key, hook in list(hooks.items()):
        if isinstance(hook, GradHook) and reducer in (None, hook.reducer):
            del hooks[key]


def _no_param() -> None:
    """Stand in for a weak reference to a parameter that another reducer owns now."""


class ParamBuckets:
    """The parameters of one optimizer, numbered in the order of registration, and the buckets they are assigned to.

    All ranks register the same parameters in the same order. If the group has been closed, `next_group` returns the one
    that replaces it, or raises. Errors of collectives are raised within the context of `errors`.
    """

    def __init__(
        self,
        group: Group,
        parameters: Callable[[], Sequence[torch.Tensor]],
        named_parameters: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        config: ReducerConfig,
        accumulate: int,
        *,
        fused_groups: Sequence[Sequence[torch.Tensor]] = (),
        next_group: Callable[[], Group] | None = None,
        errors: Errors = contextlib.nullcontext,
    ) -> None:
        self.accumulate = accumulate
        self.named_parameters = named_parameters
        self.errors = errors
        self._parameters = parameters
        self._config = config
        self._fused_groups = [[weakref.ref(param) for param in members] for members in fused_groups]
        self._next_group = next_group
        self._enter(group)

    def _enter(self, group: Group) -> None:
        """Begin in a group, with no parameters registered."""
        self.group = group
        self._channel: Backend = group.gradients
        self.name = group.next_name("gradients")
        self._known_params: list[weakref.ref[torch.Tensor]] = []  # at the last update()
        self._known_requires_grad: list[bool] = []
        self._references: list[Callable[[], torch.Tensor | None]] = []
        self._numbers: dict[int, int] = {}  # by id of the parameter
        self._buckets: list[Bucket] = []
        self._members: list[tuple[int, ...]] = []  # parameter numbers of each bucket
        self._num_layouts = 1
        self._bucket_of: list[int] = []
        self._index_in_bucket: list[int] = []
        self._number = len(group.reducers)
        self._plan = ReductionPlan(self._config, weakref.ref(self))
        group.reducers.append(self._plan)

    @abstractmethod
    def on_grad_ready(self, param: torch.Tensor, number: int) -> None:
        """Handle the gradient of a parameter, which autograd has just accumulated."""

    @property
    def number(self) -> int:
        """The index of this reducer in its group, by the order in which every rank created them."""
        return self._number

    def move_to_group(self, group: Group) -> None:
        """Reduce in another group; every rank of it calls this or creates a reducer. `next_group` takes precedence."""
        self._enter(group if self._next_group is None else self._next_group())
        self.update()

    def detach(self) -> None:
        """Stop reducing gradients."""
        for param in self.params:
            remove_hooks(param, self)
        self._plan.is_retired = True
        if self.group.is_open:
            self._release_buckets()
        self._plan.clear()
        self._members.clear()
        self._buckets.clear()
        if self.group.reducers[-1] is self._plan:
            self.group.reducers.pop()  # so that its successor is not one of several

    def update(self) -> None:
        """Register parameters that were added or unfrozen since the last call; every rank calls this.

        Raises:
            MismatchError: the ranks' parameters or configurations differ; raised on every rank.
        """
        self._require_open()
        params = self._parameters()
        requires_grad = [param.requires_grad for param in params]
        if requires_grad == self._known_requires_grad:
            known = [reference() for reference in self._known_params]
            if all(map(operator.is_, known, params)):
                return
        self._known_params, self._known_requires_grad = [weakref.ref(param) for param in params], requires_grad
        new = [(name, param) for name, param in self.named_parameters() if self._is_unowned(param)]
        if new:
            self._register_params(new)

    def _register_params(self, new: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, param in new:
            if param.layout is not torch.strided:
                raise UnsupportedError(f"parameter {name} has the layout {param.layout}: only dense ones are reduced")
        start = len(self._references)
        numbers = {id(param): number for number, (_, param) in enumerate(new, start)}
        fused = [[numbers[id(p)] for ref in refs if id(p := ref()) in numbers] for refs in self._fused_groups]
        description = f"{self._config.description} accumulate={self.accumulate}" + (f" groups={fused}" if fused else "")
        signatures = [(name if p.is_contiguous() else f"{name} strides {p.stride()}", p) for name, p in new]
        with self.errors():
            check_same_tensors(self._channel, signatures, 0, f"{self.name}.check", description)
            retire_unused(self.group)
        self._numbers.update(numbers)
        self._references.extend(weakref.ref(param) for _, param in new)
        self._bucket_of.extend([-1] * len(new))
        self._index_in_bucket.extend([-1] * len(new))
        for _, param in new:
            self._take_ownership(param, numbers[id(param)])
        params = self.params
        # Autograd finishes the last layers first.
        for members in plan_buckets(params, range(len(params) - 1, start - 1, -1), self._config, fused):
            self._add_bucket(members, params)

    @property
    def params(self) -> list[torch.Tensor]:
        """The registered parameters; for one that was deleted an uninitialized tensor of its shape."""
        params = [reference() for reference in self._references]
        if all(map(operator.is_not, params, itertools.repeat(None))):
            return params  # type: ignore[return-value]
        for plan, members in zip(self._plan.buckets, self._members, strict=True):
            for number, shape in zip(members, plan.shapes, strict=True):
                if params[number] is None:
                    params[number] = torch.empty(shape, dtype=plan.dtype, device=plan.device)
        return [param for param in params if param is not None]

    def parameter(self, number: int) -> torch.Tensor | None:
        """Return the parameter of this number, unless it was deleted."""
        return self._references[number]()

    def _is_unowned(self, param: torch.Tensor) -> bool:
        """Return True if the parameter requires a gradient that neither this nor a newer reducer reduces."""
        if not param.requires_grad or self._number_of(param) is not None:
            return False
        owner = owner_of(param)
        return owner in (None, self) or owner.group is not self.group or owner._number < self._number

    def _number_of(self, param: torch.Tensor) -> int | None:
        number = self._numbers.get(id(param))
        return number if number is not None and self._references[number]() is param else None

    def _take_ownership(self, param: torch.Tensor, number: int) -> None:
        """Install this reducer's hook; an older reducer of the parameter stops reducing it."""
        former = owner_of(param)
        if former not in (None, self):
            former._give_up(param)
        remove_hooks(param)
        param.register_post_accumulate_grad_hook(GradHook(self, number))

    def _give_up(self, param: torch.Tensor) -> None:
        number = self._number_of(param)
        if number is not None:
            self._references[number] = _no_param
            del self._numbers[id(param)]
            self._buckets[self._bucket_of[number]].num_pending -= 1

    def _add_bucket(self, members: tuple[int, ...], all_params: Sequence[torch.Tensor]) -> None:
        bucket_index, params = len(self._buckets), [all_params[number] for number in members]
        for index, number in enumerate(members):
            self._bucket_of[number], self._index_in_bucket[number] = bucket_index, index
        dtype, device = params[0].dtype, params[0].device
        # A bucket of Adasum carries flags instead of gradients: nothing is compressed.
        is_adasum = self._config.op == "adasum"
        plan = BucketPlan(
            f"{self.name}.{self._num_layouts}.{bucket_index}",
            tuple(param.shape for param in params),
            tuple(dense_strides(param) for param in params),
            dtype,
            device,
            UNRESERVED,
            frozenset(range(len(members))) if is_adasum else frozenset(),
        )
        wire = dtype if is_adasum else wire_dtype(dtype, self._config)
        if wire is not None and wire in self._channel.supported_reduce_dtypes:
            plan = replace(plan, region=self._channel.reserve(plan.length * wire.itemsize, device))
        self._plan.buckets.append(plan)
        self._members.append(members)
        self._buckets.append(self._plan.make_bucket(bucket_index, self._channel))

    def _rebuild_buckets(self, order: Sequence[int]) -> None:
        """Assign the parameters to new buckets in the order in which their gradients become ready."""
        self._num_layouts += 1
        params = self.params
        all_members = plan_buckets(params, order, self._config)
        if all_members == self._members:
            return
        unbucketed = {
            members[index]
            for members, plan in zip(self._members, self._plan.buckets, strict=True)
            for index in plan.unbucketed
        }
        self._release_buckets()
        self._buckets.clear()
        self._members.clear()
        self._plan.clear()
        for bucket_index, members in enumerate(all_members):
            self._add_bucket(members, params)
            self._plan.unbucket(bucket_index, [n for n, number in enumerate(members) if number in unbucketed])

    def _release_buckets(self) -> None:
        for bucket in self._buckets:
            bucket.release()

    @property
    def order(self) -> list[int] | None:
        """The parameters' numbers in bucket order, once the buckets have been rebuilt."""
        return [number for members in self._members for number in members] if self._num_layouts > 1 else None

    def _require_open(self) -> None:
        if self.group.is_open:
            return
        if self._next_group is None:
            raise NotInitializedError(
                "this optimizer reduced gradients in a group that dd.shutdown() or dd.remove_group() has closed: call "
                "dd.wrap_optimizer again"
            )
        self._enter(self._next_group())

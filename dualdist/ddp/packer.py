"""Pack gradients into buckets while autograd computes them, and make the reduced values the parameters' gradients.

In C++ where the extension was built (csrc/gradients.cpp); GradientPacker here is the same in Python.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch.autograd.graph import Node, get_gradient_edge

from dualdist.collectives.group import Group
from dualdist.utils import accelerator, extension

HOOK = "dualdist"  # the key of a node's hook in its metadata
current_backward = torch._C._current_graph_task_id  # private to torch: tests/unit/test_torch_private_names.py
NO_BACKWARD = -1  # current_backward() outside of one


class GradientOwner(Protocol):
    """The methods of a reducer that packers, and the registries of other reducers, call."""

    @property
    def group(self) -> Group: ...
    @property
    def number(self) -> int: ...
    def give_up(self, param: torch.Tensor) -> None: ...
    def begin_backward(self, backward: int) -> None: ...
    def on_bucket_ready(self) -> None: ...
    def refuse_gradient(self, number: int) -> None: ...


def create_packer(reducer: GradientOwner) -> GradientPacker:
    """Return a packer that calls this reducer, in C++ if possible."""
    core = extension.load()
    return GradientPacker(reducer) if core is None else cast(GradientPacker, core.GradientPacker(reducer))


def owner_of(param: torch.Tensor) -> GradientOwner | None:
    """Return the reducer of a parameter's gradients."""
    core = extension.load()
    if core is not None:
        return cast("GradientOwner | None", core.owner_of(param))
    if param.is_nested or param.layout is not torch.strided:
        return None  # torch finds no gradient edge of some of these, which are refused when they are registered
    hook = _metadata(get_gradient_edge(param).node).get(HOOK)
    packer = None if hook is None else hook.packer()
    return None if packer is None else packer.reducer()


def is_dense(grad: torch.Tensor | None) -> bool:
    """Return True if there is a gradient, and it is not sparse."""
    return grad is not None and grad.layout is torch.strided


def is_same_memory(grad: torch.Tensor, view: torch.Tensor) -> bool:
    """Return True if both tensors are the same elements in memory."""
    return grad.data_ptr() == view.data_ptr() and grad.shape == view.shape and grad.stride() == view.stride()


def is_view_of(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Return True if a gradient is what assign_grad() made of this view."""
    return grad is not None and is_dense(grad) and is_same_memory(grad, view)


def _metadata(node: Node) -> dict[str, _Hook]:
    """Return a node's metadata, which torch declares as a method."""
    return cast("dict[str, _Hook]", node.metadata)


class _Hook:
    """A hook of an AccumulateGrad node, which runs after all hooks of the parameter."""

    def __init__(self) -> None:
        self.packer: Callable[[], GradientPacker | None] = lambda: None
        self.number = -1

    def __call__(self, grad_inputs: Any, grad_outputs: Any) -> None:
        packer = self.packer()
        if packer is not None:
            packer.on_accumulated(self)


@dataclass
class _Member:
    param: torch.Tensor | None  # None if another reducer has taken it
    node: Node | None
    hook: _Hook | None
    bucket: int = -1
    view: torch.Tensor | None = None  # its place in the bucket; None if it is reduced separately
    is_ready: bool = False
    is_packed: bool = False
    is_in_place: bool = False  # packed without a copy


@dataclass
class _Bucket:
    members: Sequence[int]
    scale: float  # of the copies
    pending: int = 0
    streams: set[torch.Stream] = field(default_factory=set)


class GradientPacker:
    """Hooks on parameters, which are numbered, and the buckets that their gradients are copied to."""

    def __init__(self, reducer: GradientOwner) -> None:
        self.is_suspended = False
        self.packs = False  # the backward is followed by a reduction
        self.launches_early = False  # call on_bucket_ready before backward ends
        self.reducer = weakref.ref(reducer)
        self._lock = threading.RLock()  # autograd runs the hooks of each device in a separate thread
        self._members: dict[int, _Member] = {}
        self._buckets: list[_Bucket] = []
        self._open: set[int] = set()  # autograd's ids of the backwards that have begun and not ended
        self._order: list[int] = []

    def watch(self, param: torch.Tensor, number: int) -> None:
        """Reduce the gradients of a parameter from now on, in place of any other packer."""
        node = get_gradient_edge(param).node
        hook = _metadata(node).get(HOOK)
        if hook is None:
            hook = _metadata(node)[HOOK] = _Hook()
            node.register_hook(hook)
        self._members[number] = _Member(param, node, hook)
        hook.packer, hook.number = weakref.ref(self), number

    def forget(self, number: int) -> None:
        """Leave a parameter to the packer that has taken it."""
        member = self._members[number]
        if member.param is not None and member.bucket >= 0 and not member.is_ready:
            self._buckets[member.bucket].pending -= 1
        if member.hook is not None and member.hook.packer() is self:
            member.hook.packer = lambda: None
        member.param = member.node = member.hook = None

    def detach(self) -> None:
        """Stop watching all parameters."""
        for number in self._members:
            self.forget(number)
        self._members, self._buckets = {}, []
        self._open.clear()
        self._order.clear()

    def set_bucket(
        self, index: int, members: Sequence[int], views: Sequence[torch.Tensor | None], scale: float
    ) -> None:
        """Set the members of a bucket, the views of its memory that their gradients are copied to, and the factor that
        the copies are multiplied by.
        """
        self._buckets[index : index + 1] = [_Bucket(members, scale)]
        for number, view in zip(members, views, strict=True):
            self._members[number].bucket, self._members[number].view = index, view
        self._reset(index)

    def clear_buckets(self) -> None:
        self._buckets = []
        for member in self._members.values():
            member.bucket, member.view = -1, None

    def reset(self) -> None:
        """Forget which gradients are ready."""
        self._order.clear()
        for index in range(len(self._buckets)):
            self._reset(index)

    def _reset(self, index: int) -> None:
        bucket = self._buckets[index]
        members = [self._members[number] for number in bucket.members]
        for member in members:
            member.is_ready = member.is_packed = member.is_in_place = False
        bucket.pending = sum(member.param is not None for member in members)
        bucket.streams.clear()

    def open(self, backward: int) -> None:
        self._open.add(backward)

    def is_open(self, backward: int) -> bool:
        return backward in self._open

    def close_all(self) -> None:
        self._open.clear()

    def pending(self, index: int) -> int:
        """Return how many gradients a bucket lacks."""
        return self._buckets[index].pending

    def order(self) -> list[int]:
        """Return the parameters whose gradients are ready, in that order."""
        return list(self._order)

    @torch.no_grad()
    def pack_rest(self, index: int) -> bool:
        """Pack the gradients that no hook has packed, zeros for missing and sparse ones.

        Returns:
            True if every member has a dense gradient.
        """
        all_dense, bucket = True, self._buckets[index]
        for number in bucket.members:
            member = self._members[number]
            if not member.is_packed and not self._pack(member, bucket):
                all_dense = False
                if member.view is not None:
                    member.view.zero_()
            if member.is_in_place and member.view is not None and bucket.scale != 1.0:
                member.view.mul_(bucket.scale)
        for stream in bucket.streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        return all_dense

    @torch.no_grad()
    def assign_grads(self, index: int, as_views: bool) -> None:
        """Make the bucket's values the gradients of its members: as views, or copied."""
        for number in self._buckets[index].members:
            member = self._members[number]
            if member.param is not None and member.view is not None:
                assign_grad(member.param, member.view, as_views=as_views)

    def on_accumulated(self, hook: _Hook) -> None:
        """Handle a gradient that autograd has just accumulated."""
        reducer = self.reducer()
        if self.is_suspended or reducer is None:
            return
        backward = current_backward()
        if backward not in self._open:
            reducer.begin_backward(backward)
        number = hook.number  # begin_backward may have registered the parameters anew
        if not self.packs or hook.packer() is not self:
            return
        with self._lock:
            member = self._members[number]
            if member.is_ready or member.bucket < 0 or member.param is None:
                return
            grad, view = member.param.grad, member.view
            if is_dense(grad) and view is not None and (grad.dtype, grad.device) != (view.dtype, view.device):  # type: ignore[union-attr]
                reducer.refuse_gradient(number)
            bucket = self._buckets[member.bucket]
            self._pack(member, bucket)
            member.is_ready = True
            self._order.append(number)
            bucket.pending -= 1
            is_full = bucket.pending == 0
        if is_full and self.launches_early:
            reducer.on_bucket_ready()

    def _pack(self, member: _Member, bucket: _Bucket) -> bool:
        """Copy a gradient to its place in the bucket, unless it is there; False if it is missing or not dense."""
        grad = None if member.param is None else member.param.grad
        if grad is not None and (stream := accelerator.current_stream(grad.device)) is not None:
            bucket.streams.add(stream)  # also of a gradient that the bucket's launch reads
        if grad is None or member.view is None or not is_dense(grad):
            return False
        member.is_in_place = is_same_memory(grad, member.view)
        if not member.is_in_place:
            with torch.no_grad():
                if bucket.scale == 1.0:
                    member.view.copy_(grad)
                else:
                    torch.mul(grad, bucket.scale, out=member.view)
        member.is_packed = True
        return True


def assign_grad(param: torch.Tensor, view: torch.Tensor, *, as_views: bool) -> None:
    """Make the values of a view of a bucket the gradient of a parameter: as another view, or copied."""
    grad = param.grad
    if is_view_of(grad, view):
        return
    if as_views:
        param.grad = view.data  # another tensor in the same memory, so that the program never gets this one
    elif grad is not None and is_dense(grad) and not grad.requires_grad:
        grad.copy_(view)
    else:
        param.grad = view.clone()

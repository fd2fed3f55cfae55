"""Checks before an optimizer step: NaN and infinite gradients, and parameters that differ between ranks.

Note [non-finite report]: a sum over ranks that is not finite does not show whose part was not. But until the reduced
values are assigned, every rank still has its own gradients. The reduced values are the same on all ranks, so all find
the same members, and exchange the kinds of their own gradients in one more message, sent only then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dualdist.collectives.consistency import options_of, require_same
from dualdist.errors import NonFiniteError
from dualdist.utils.suggest import format_ranks

if TYPE_CHECKING:
    from dualdist.ddp.buckets import Bucket
    from dualdist.ddp.reducer import Reducer
    from dualdist.engine.channel import Channel

NAN, INFINITE = 1, 2
KIND_NAMES = {NAN: "NaN", INFINITE: "infinite", NAN | INFINITE: "NaN and infinite"}
REPORT_NAME = "gradients.nonfinite"  # of the exchange
SHOWN = 5  # gradients, in an error
# For these dtypes a dot product is faster than a sum.
DOT_DTYPES = (torch.float32, torch.float64)
# Set by torch's GradScaler on optimizers whose step() skips itself.
FOUND_INF = "found_inf"


def probe(values: torch.Tensor) -> torch.Tensor:
    """Return a scalar that is not finite if a value is not, and maybe if finite values are too large to add up."""
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if not flat.is_floating_point():
        return flat.new_zeros((), dtype=torch.float32)
    if flat.dtype in DOT_DTYPES and len(flat):
        return torch.dot(flat, flat).float()
    return flat.sum(dtype=torch.float32)


def nonfinite_kinds(grad: torch.Tensor | None) -> int:
    """Return the union of NAN and INFINITE found in the gradient, 0 if it is finite."""
    if grad is None:
        return 0
    values = (grad._values() if grad.is_sparse else grad).detach()
    if values.numel() == 0 or math.isfinite(probe(values).item()):
        return 0
    wide = values if values.dtype.itemsize > 1 else values.float()
    return (NAN if wide.isnan().any() else 0) | (INFINITE if wide.isinf().any() else 0)


def find_suspects(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return True for each tensor that may hold a non-finite value; waits once per device."""
    suspect = [False] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        is_finite = torch.isfinite(torch.stack([probe(tensors[number]) for number in numbers])).tolist()
        for number, finite in zip(numbers, is_finite, strict=True):
            suspect[number] = not finite
    return suspect


class NonFiniteReport(dict[int, int]):
    """The non-finite gradients of one reduction: kinds of this rank's own by the parameter's number."""

    def add(self, number: int, own: torch.Tensor | None) -> None:
        """Add a parameter whose reduced gradient is not finite; `own` is this rank's gradient before the reduction."""
        if number not in self:  # one that is dense on some ranks and sparse on others is found in both parts
            self[number] = nonfinite_kinds(own) if len(self) < SHOWN else 0

    def scan(self, buckets: Sequence[Bucket], params_of: Callable[[Bucket], list[torch.Tensor | None]]) -> None:
        """Add the non-finite members of the buckets, after unpack()."""
        suspects = find_suspects([bucket.reduced_values() for bucket in buckets])
        for bucket in itertools.compress(buckets, suspects):
            params = params_of(bucket)
            for index in bucket.nonfinite_members():
                param = params[index]
                self.add(bucket.plan.numbers[index], None if param is None else param.grad)

    def exchange(self, channel: Channel) -> dict[int, list[int]]:
        """Return the kinds on every rank, [] for parameters beyond SHOWN; every rank of the reduction calls this."""
        if not self:
            return {}
        shown = [*self.values()][:SHOWN]
        table = torch.zeros(len(shown), channel.size, dtype=torch.int32, device="cpu")
        table[:, channel.rank] = torch.tensor(shown, dtype=torch.int32, device="cpu")
        flat = table.view(-1)
        channel.run(REPORT_NAME, lambda backend: backend.allreduce_(flat, "max", REPORT_NAME))
        rows = flat.view(len(shown), channel.size).tolist()
        return {number: rows[n] if n < SHOWN else [] for n, number in enumerate(self)}


def format_nonfinite(kinds_by_name: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> str:
    """List the first gradients with the kinds of non-finite values and the ranks that had them."""
    clauses = []
    for name, kinds in list(kinds_by_name.items())[:SHOWN]:
        with_kind = {
            kind: [rank for rank, own in zip(ranks, kinds, strict=False) if own == kind] for kind in KIND_NAMES
        }
        details = [f"{KIND_NAMES[kind]} on {format_ranks(some)}" for kind, some in with_kind.items() if some]
        if kinds and not details:
            details = ["finite on every rank, but not their sum"]
        clauses.append(f"{name} ({', '.join(details)})" if details else name)
    more = f" and {len(kinds_by_name) - SHOWN} more" if len(kinds_by_name) > SHOWN else ""
    return f"{', '.join(clauses)}{more}"


class StepChecks:
    """Check gradients before every step, and parameters before every `every`-th, beginning with the first."""

    def __init__(self, reducer: Reducer, every: int) -> None:
        self._reducer = reducer
        self._every = every
        self._steps = 0  # by all ranks: steps while some ranks have joined do not count
        self._checked_reductions = 0  # at the last step, as a step may call that of its base class

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise NonFiniteError or DriftError on every rank if the step must not be taken."""
        reducer = self._reducer
        if reducer.num_reductions == self._checked_reductions:
            return
        self.check_gradients(optimizer)
        if not reducer.has_joined_ranks:  # their parameters are not updated
            if self._steps % self._every == 0:
                name = f"{reducer.name}.before_step.{self._steps}"
                options = options_of(optimizer, has_all_state=not reducer.config.shard)
                require_same(
                    reducer.group, reducer.tensors_in_order(), name, options, f"before step {self._steps + 1}, "
                )
            self._steps += 1
        self._checked_reductions = reducer.num_reductions  # last, so that a repeated step() raises again

    def check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise NonFiniteError unless the program has replaced the gradients, or a loss scaler will skip the step."""
        reducer = self._reducer
        if not reducer.nonfinite or getattr(optimizer, FOUND_INF, None) is not None:
            return
        names = {id(param): name for name, param in reducer.named_parameters()}
        remaining = {
            names.get(id(param), f"parameter {number}"): kinds
            for number, kinds in reducer.nonfinite.items()
            if (param := reducer.parameter(number)) is not None and nonfinite_kinds(param.grad)
        }
        if remaining:
            raise NonFiniteError(
                f"gradients are not finite: {format_nonfinite(remaining, reducer.group.ranks)}. The step was not "
                "taken: parameters and the optimizer's state are unchanged"
            )

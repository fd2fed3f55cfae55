"""Which gradients are NaN or infinite, and on which ranks they were so before they were reduced.

Note [blame]: a sum over ranks that is not finite does not tell whose part was not. But until the parameters are given
what has been reduced, every rank still has its own gradients. What has been reduced is the same on all ranks, so that
they all find the same, and tell each other about their own in one more message, which is only sent then.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dualdist.collectives.consistency import require_same
from dualdist.errors import NonFiniteError, UsageError
from dualdist.utils.suggest import format_ranks

if TYPE_CHECKING:
    from dualdist.backends.base import Backend
    from dualdist.ddp.buckets import Bucket
    from dualdist.ddp.reducer import Reducer

NAN, INFINITE = 1, 2
WORDS = {NAN: "NaN", INFINITE: "infinite", NAN | INFINITE: "NaN and infinite"}
BLAME = "gradients.blame"  # the name under which the ranks tell each other
SHOWN = 5  # gradients, in an error
# One pass over these takes less time than adding them up.
QUICK = (torch.float32, torch.float64)


def probe(values: torch.Tensor) -> torch.Tensor:
    """A number that is not finite where a value is not, and may be so where finite ones are too large to add up."""
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if not flat.is_floating_point():
        return flat.new_zeros((), dtype=torch.float32)
    if flat.dtype in QUICK and len(flat):
        return torch.dot(flat, flat).float()
    return flat.sum(dtype=torch.float32)


def nonfinite_kinds(grad: torch.Tensor | None) -> int:
    """What of NAN and INFINITE is in the gradient."""
    if grad is None:
        return 0
    values = (grad._values() if grad.is_sparse else grad).detach()
    if values.numel() == 0 or math.isfinite(probe(values).item()):
        return 0
    wide = values if values.dtype.itemsize > 1 else values.float()
    return (NAN if wide.isnan().any() else 0) | (INFINITE if wide.isinf().any() else 0)


def find_suspects(rows: Sequence[torch.Tensor]) -> list[bool]:
    """Which rows may hold something that is not finite; the host waits for each device once."""
    found = [False] * len(rows)
    for device in dict.fromkeys(row.device for row in rows):
        mine = [number for number, row in enumerate(rows) if row.device == device]
        is_finite = torch.isfinite(torch.stack([probe(rows[number]) for number in mine])).tolist()
        for number, is_fine in zip(mine, is_finite, strict=True):
            found[number] = not is_fine
    return found


@dataclass
class NonFiniteReport:
    """Of one round's gradients: those that are not finite, by bucket and member, and what of it was this rank's own."""

    members: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def note(self, member: tuple[int, int], own: torch.Tensor | None) -> None:
        """This member is not finite now; `own` is its gradient here before it was reduced."""
        self.members.append(member)
        self.kinds.append(nonfinite_kinds(own) if len(self.members) <= SHOWN else 0)

    def look(self, buckets: Sequence[Bucket], own: Callable[[int, int], torch.Tensor | None]) -> None:
        """Note what of the buckets is not finite, after unpack(); `own` gives this rank's gradients."""
        for place, is_suspect in enumerate(find_suspects([bucket.reduced_values() for bucket in buckets])):
            for member in buckets[place].nonfinite_members() if is_suspect else ():
                self.note((place, member), own(place, member))

    def shared(self, line: Backend) -> dict[tuple[int, int], list[int]]:
        """The kinds on every rank, in their order; of members beyond SHOWN none. All who go through the round call."""
        if not self.members:
            return {}
        shown = self.kinds[:SHOWN]
        table = torch.zeros(len(shown), line.size, dtype=torch.int32, device="cpu")
        table[:, line.rank] = torch.tensor(shown, dtype=torch.int32, device="cpu")
        flat = table.view(-1)
        line.allreduce_(flat, "max", BLAME).wait()
        rows = flat.view(len(shown), line.size).tolist()
        return {member: rows[n] if n < SHOWN else [] for n, member in enumerate(self.members)}


def format_nonfinite(blame: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> str:
    """The gradients, by name, and what was wrong with them on which ranks; the first ones."""
    clauses = []
    for name, kinds in list(blame.items())[:SHOWN]:
        found = [(word, _those(ranks, kinds, kind)) for kind, word in WORDS.items()]
        said = [f"{word} on {format_ranks(those)}" for word, those in found if those]
        whole = ["finite on every rank, but not together"] if kinds else []
        clauses.append(f"{name} ({', '.join(said or whole)})" if said or whole else name)
    more = f" and {len(blame) - SHOWN} more" if len(blame) > SHOWN else ""
    return f"{', '.join(clauses)}{more}"


def _those(ranks: Sequence[int], kinds: Sequence[int], kind: int) -> list[int]:
    return [rank for rank, own in zip(ranks, kinds, strict=True) if own == kind] if kinds else []


# What torch's GradScaler sets on optimizers whose step() skips itself by it.
FOUND_INF = "found_inf"


class StepChecks:
    """Gradients are looked at before every step, parameters before every `every`-th, beginning with the first."""

    def __init__(self, reducer: Reducer, every: int) -> None:
        self._reducer = reducer
        self._every = every
        self._steps = 0  # that all ranks took: who has joined counts none
        self._seen = 0  # reductions, at the last step: a step may call that of its base class

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """NonFiniteError or DriftError on every rank where the step must not be taken."""
        reducer = self._reducer
        if reducer.reductions == self._seen:
            return
        self.gradients(optimizer)
        if not reducer.some_have_joined:  # whose parameters are left behind by design
            if self._steps % self._every == 0:
                self.parameters(self._steps)
            self._steps += 1
        self._seen = reducer.reductions  # now: a program that calls step() once more is refused once more

    def of_closure(self, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
        """For each time that a closure is called: parameters are what they were before the step at the first one."""
        yield functools.partial(self.before_step, optimizer)
        yield from itertools.repeat(functools.partial(self.gradients, optimizer))

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """NonFiniteError unless the program has put right what is to blame, or a loss scaler will pass it over."""
        reducer = self._reducer
        if not reducer.blamed or getattr(optimizer, FOUND_INF, None) is not None:
            return
        names = {id(param): name for name, param in reducer.named_parameters()}
        left = {
            names.get(id(param), f"parameter {number}"): kinds
            for number, kinds in reducer.blamed.items()
            if (param := reducer.parameter(number)) is not None and nonfinite_kinds(param.grad)
        }
        if left:
            raise NonFiniteError(
                f"gradients are not finite: {format_nonfinite(left, reducer.group.ranks)}. The step was not taken: "
                "parameters and the optimizer's state are as they were"
            )

    def parameters(self, step: int) -> None:
        """DriftError unless all ranks hold the same parameters."""
        reducer = self._reducer
        name = f"{reducer.name}.before_step.{step}"
        require_same(reducer.group, reducer.named_parameters(), name, f"before step {step + 1}, ")


def validate_check_every(every: int | None) -> int | None:
    """How often parameters are checked; UsageError unless that is None, or 1 or more."""
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise UsageError(f"check_every={every!r}: expected after how many steps parameters are compared, 1 or more")
    return every

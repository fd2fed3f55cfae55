"""PowerSGD and top-k: a rank sends a part of each gradient, and adds what it left out to the next one.

Note [error feedback]: with g what a rank's backward gave, and e its residual, it sends a part C of g + e and keeps
e' = g + e - C. So the sum over ranks of what is sent and what is kept is that of all gradients, always: nothing is
lost, it comes later. A residual is stored only once all ranks have the result, and only for parameters that the step
gets: not where a backward was interrupted, the result is not finite (a loss scaler will skip the step), or no rank used
the parameter. All ranks decide this alike, from the result.

Note [PowerSGD]: a matrix M, as the sum over ranks, is approximated by P Q^T with few columns (Vogels et al., "PowerSGD:
Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, algorithm 1): P = orth(sum of M Q)
with the Q of the last step, then Q = sum of M^T P. A rank sent P P^T M of its own M; the paper's residual differs by
terms whose sum over ranks is 0. All ranks compute orth() of the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from dualdist.backends.arithmetic import WIDER, divide_
from dualdist.backends.base import Backend
from dualdist.backends.control_plane import as_bytes
from dualdist.backends.operation import Stages
from dualdist.collectives.reductions import allreduce_
from dualdist.ddp.bucket import Bucket, BucketStrategy
from dualdist.ddp.compression import ErrorFeedback, PowerSGD, TopK
from dualdist.ddp.config import ReducerConfig
from dualdist.ddp.layout import BucketLayout
from dualdist.ddp.nonfinite import nonfinite_kinds
from dualdist.engine.channel import Channel, Work
from dualdist.errors import UnsupportedError

POSITION = torch.int32  # of an element, in top-k


class FeedbackStrategy(BucketStrategy):
    """Send a part of each gradient; with the state of an optimizer's reducer, by the number of the parameter."""

    has_state = True

    def __init__(self, config: ReducerConfig) -> None:
        super().__init__(config)
        assert isinstance(config.compressor, ErrorFeedback)
        self.compression = config.compressor
        self._reductions = 0
        self.residuals: dict[int, torch.Tensor] = {}  # what this rank has not sent yet
        self.factors: dict[int, torch.Tensor] = {}  # PowerSGD's last Q, the same on every rank

    def make_bucket(self, layout: BucketLayout, channel: Channel, dense: set[int]) -> Bucket:
        return FeedbackBucket(layout, self, channel, dense)

    @property
    def is_warming_up(self) -> bool:
        return self._reductions < self.compression.warmup_steps

    def commit(self, buckets: Sequence[Bucket]) -> None:
        """Store the residuals of a reduction that the program gets: Note [error feedback]."""
        self._reductions += 1
        if not any(nonfinite_kinds(bucket.reduced_values()) for bucket in buckets):
            for bucket in buckets:
                if isinstance(bucket, FeedbackBucket):
                    bucket.store()

    def agree(self, channel: Channel, name: str) -> None:
        """Adopt the largest number of reductions of any rank; every rank calls this."""
        found = torch.tensor([self._reductions], dtype=torch.int32, device="cpu")
        channel.run(name, lambda backend: backend.allreduce_(found, "max", name))
        self._reductions = int(found)

    def export(self, numbers: Sequence[int | None]) -> dict[str, Any]:
        known = [(position, number) for position, number in enumerate(numbers) if number is not None]
        return {
            "reductions": self._reductions,
            "residuals": {position: self.residuals[n] for position, n in known if n in self.residuals},
            "factors": {position: self.factors[n] for position, n in known if n in self.factors},
        }

    def load(
        self, state: Mapping[str, Any] | None, params: Sequence[torch.Tensor], numbers: Sequence[int | None]
    ) -> None:
        self._reductions, self.residuals, self.factors = 0, {}, {}
        if state is None:
            return
        self._reductions = state["reductions"]
        for own, found in ((self.residuals, state["residuals"]), (self.factors, state["factors"])):
            for position, value in found.items():
                if (number := numbers[position]) is not None:
                    own[number] = value.to(params[position].device, copy=True)


def redistribute(states: Sequence[Mapping[str, Any]], rank: int, size: int, op: str) -> Mapping[str, Any]:
    """Return a rank's state from those of all ranks of a job of maybe another size.

    What all ranks together have not sent stays the same: its sum, for a mean divided by the number of ranks.
    """
    if len(states) == size:
        return states[rank]
    parts = len(states) if op == "mean" else size
    positions = sorted({position for state in states for position in state["residuals"]})
    sums = {n: sum(state["residuals"][n] for state in states if n in state["residuals"]) for n in positions}
    return {**states[0], "residuals": {position: total / parts for position, total in sums.items()}}


class FeedbackBucket(Bucket):
    """A bucket of which each rank sends a part.

    One allreduce carries PowerSGD's P, the members that are sent whole, and the flags.
    """

    may_scale = False  # what is left of other steps is added to the values

    def __init__(self, layout: BucketLayout, state: FeedbackStrategy, channel: Channel, dense: set[int]) -> None:
        super().__init__(layout, replace(state.config, compressor=None), channel, dense)
        self._compression = state.compression
        self._state = state
        self._wide = WIDER.get(layout.dtype, layout.dtype)  # in which parts are sent
        # By member, if a part of it is sent: its rows and columns as a matrix.
        self._matrices = {member: _matrix_shape(layout.shapes[member]) for member in self._choose_members()}
        self._counts = [layout.shapes[member].numel() for member in self._matrices]
        self._is_active = False  # in the present reduction
        self._inputs: dict[int, torch.Tensor] = {}  # by member: the gradient and the residual
        self._factors: dict[int, torch.Tensor] = {}  # by member: PowerSGD's Q
        self._gathered = torch.empty(0)  # of top-k: bytes of positions and values of all ranks
        self._approximations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by member: PowerSGD's P and Q

    def _choose_members(self) -> list[int]:
        """Return the members of which a part is smaller than the whole; the same on every rank."""
        shapes, item = self.layout.shapes, self._wide.itemsize
        if isinstance(self._compression, PowerSGD):
            rank, matrices = self._compression.rank, [_matrix_shape(shape) for shape in shapes]
            return [member for member, (n, m) in enumerate(matrices) if (n + m) * rank < n * m]
        assert isinstance(self._compression, TopK)
        if sum(shape.numel() for shape in shapes) > torch.iinfo(POSITION).max:
            return []
        counts = [(shape.numel(), _num_elements(shape, self._compression.ratio)) for shape in shapes]
        return [member for member, (count, k) in enumerate(counts) if k * (item + POSITION.itemsize) < count * item]

    def _start_allreduce(self, name: str) -> Work[torch.Tensor]:
        self._is_active = not self._state.is_warming_up and self.layout.dtype.is_floating_point
        self._inputs, self._factors, self._approximations = {}, {}, {}
        if not self._is_active:
            return super()._start_allreduce(name)
        for member, (number, view) in enumerate(zip(self.layout.numbers, self.views, strict=True)):
            assert view is not None, "members_to_unbucket() lets none out"
            value = view.to(self._wide, copy=True, memory_format=torch.contiguous_format)
            residual = self._state.residuals.get(number)
            self._inputs[member] = value if residual is None else value.add_(residual)
        parts = [self._project(member) for member in self._matrices if isinstance(self._compression, PowerSGD)]
        parts += [value.flatten() for member, value in self._inputs.items() if member not in self._matrices]
        sent = torch.cat([*parts, self.tail.to(self._wide)])
        self.sent_bytes = (sent.numel() - self.tail.numel()) * sent.element_size()
        selected = None
        if isinstance(self._compression, TopK) and self._matrices:
            selected = self._select(self._compression.ratio)
            self.sent_bytes += selected.nbytes
        return self._start(name, sent, lambda backend: self._exchange(backend, sent, selected, name))

    def _exchange(
        self, backend: Backend, sent: torch.Tensor, selected: torch.Tensor | None, name: str
    ) -> Stages[torch.Tensor]:
        """Return the sum over ranks of what is sent, after the second message."""
        total: torch.Tensor = yield allreduce_(backend, sent, "sum", name)
        if selected is not None:
            self._gathered = yield backend.allgather(selected, f"{name}.elements")
        elif self._matrices and isinstance(self._compression, PowerSGD):
            yield from self._approximate(backend, self._compression.rank, total)
        return total

    @torch.no_grad()
    def unpack(self) -> None:
        if not self._is_active:
            super().unpack()
            return
        assert self._result is not None, "call wait() first"
        whole = [member for member in self._inputs if member not in self._matrices]
        counts = [self.layout.shapes[member].numel() for member in whole]
        _, *sums, tail = self._result.split(
            [self._result.numel() - sum(counts) - self.tail.numel(), *counts, self.tail.numel()]
        )
        self.tail.copy_(tail)
        for member, total in zip(whole, sums, strict=True):
            self._assign(member, total)
        if isinstance(self._compression, PowerSGD):
            for member, (left, right) in self._approximations.items():
                self._factors[member] = right
                self._assign(member, left @ right.t())
        elif self._matrices:
            self._add_elements()
        self._undo_predivision()

    def _assign(self, member: int, total: torch.Tensor) -> None:
        """Make a sum over ranks, or their mean, the gradient of a member."""
        view = self.views[member]
        assert view is not None
        mean = divide_(total, self._channel.size) if self.config.op == "mean" else total
        view.copy_(mean.view(self.layout.shapes[member]))

    def members_to_unbucket(self, flags: Sequence[tuple[bool, bool]]) -> list[tuple[int, bool]]:
        if any(sparse for _, sparse in flags) and not self.config.sparse_as_dense:
            raise UnsupportedError(
                f"a sparse gradient with compression={self._compression}: pass sparse_as_dense=True to "
                "dd.wrap_optimizer, or leave compression out"
            )
        return []

    def store(self) -> None:
        """Store what this rank has not sent, of the members that some rank used."""
        flags = [] if self._sent_all_dense else self.read_flags()
        for member, rest in self._inputs.items():
            number = self.layout.numbers[member]
            if flags and not any(flags[member]):
                continue
            if member in self._matrices:
                self._state.residuals[number] = rest
            else:
                self._state.residuals.pop(number, None)
            if member in self._factors:
                self._state.factors[number] = self._factors[member]
        self._inputs, self._factors = {}, {}

    def _project(self, member: int) -> torch.Tensor:
        """Return M Q of a matrix: Note [PowerSGD]."""
        projected: torch.Tensor = self._inputs[member].view(self._matrices[member]) @ _orthonormal(self._last_q(member))
        return projected.flatten()

    def _last_q(self, member: int) -> torch.Tensor:
        """Return the Q of the last reduction, or a random one, the same on every rank and in every run."""
        assert isinstance(self._compression, PowerSGD)
        number, shape = self.layout.numbers[member], (self._matrices[member][1], self._compression.rank)
        known = self._state.factors.get(number)
        if known is not None and known.shape == shape:
            return known
        random = torch.Generator().manual_seed(number)
        return torch.randn(*shape, generator=random, dtype=self._wide, device="cpu").to(self.layout.device)

    def _approximate(self, backend: Backend, rank: int, total: torch.Tensor) -> Stages[None]:
        """Find P and Q of the matrices by one more allreduce, and leave what was not sent in the inputs."""
        rows, columns = zip(*self._matrices.values(), strict=True)
        counts = [n * rank for n in rows]
        lefts = [_orthonormal(each.view(-1, rank)) for each in total[: sum(counts)].split(counts)]
        rights = []
        for (member, shape), left in zip(self._matrices.items(), lefts, strict=True):
            matrix = self._inputs[member].view(shape)
            rights.append(matrix.t() @ left)
            matrix.addmm_(left, rights[-1].t(), alpha=-1)
        sent = torch.cat([each.flatten() for each in rights])
        self.sent_bytes += sent.nbytes
        yield allreduce_(backend, sent, "sum", f"{self._name}.right")
        parts = [part.view(-1, rank) for part in sent.split([m * rank for m in columns])]
        self._approximations = dict(zip(self._matrices, zip(lefts, parts, strict=True), strict=True))

    def _select(self, ratio: float) -> torch.Tensor:
        """Return positions and values of the largest elements as bytes, and leave the others in the inputs."""
        positions, values = [], []
        for member, start in zip(self._matrices, accumulate(self._counts, initial=0), strict=False):
            flat = self._inputs[member].view(-1)
            chosen = flat.abs().topk(_num_elements(self.layout.shapes[member], ratio), sorted=False).indices
            positions.append(chosen.to(POSITION) + start)
            values.append(flat[chosen])
            flat[chosen] = 0
        return torch.cat([as_bytes(torch.cat(positions)), as_bytes(torch.cat(values))])

    def _add_elements(self) -> None:
        """Assign the sums of the elements, in the order of ranks, which is the same on every backend."""
        total = torch.zeros(sum(self._counts), dtype=self._wide, device=self.layout.device)
        for row in self._gathered.view(self._channel.size, -1):
            num = len(row) // (POSITION.itemsize + self._wide.itemsize)
            positions, values = row.split([num * POSITION.itemsize, num * self._wide.itemsize])
            total.index_add_(0, positions.clone().view(POSITION), values.clone().view(self._wide))
        for member, part in zip(self._matrices, total.split(self._counts), strict=True):
            self._assign(member, part)


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns of a gradient as a matrix; (n, 1) for a vector."""
    rows = shape[0] if shape else 1
    return rows, shape.numel() // max(1, rows)


def _num_elements(shape: torch.Size, ratio: float) -> int:
    return math.ceil(ratio * shape.numel())


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span at least those of the matrix; any, where these are 0."""
    found: torch.Tensor = torch.linalg.qr(matrix).Q
    return found

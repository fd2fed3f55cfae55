"""What an allreduce costs by the alpha-beta model of its algorithm, and what that says of more ranks than there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualdist.bench.statistics import least_squares

# An allreduce of n bytes between p ranks takes a(p) * alpha + b(p) * n * beta: alpha seconds to begin a message, beta
# seconds for each byte of one (Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994). The cost
# of adding up (gamma in the paper) goes with the bytes, and is in beta here. The counts are those of Thakur,
# Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005, 4.5.
Counts = Callable[[int], tuple[float, float]]


def _ring(ranks: int) -> tuple[float, float]:
    """Reduce-scatter around the ring, then allgather: p - 1 messages of n / p bytes each."""
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks


def _tree(ranks: int) -> tuple[float, float]:
    """Recursive doubling: in each of log2 p rounds everybody exchanges all n bytes."""
    rounds = math.ceil(math.log2(ranks))
    return rounds, rounds


def _halving(ranks: int) -> tuple[float, float]:
    """Rabenseifner's: recursive halving, then doubling; a tree's messages and a ring's bytes."""
    return 2 * math.ceil(math.log2(ranks)), 2 * (ranks - 1) / ranks


ALGORITHMS: dict[str, Counts] = {"ring": _ring, "tree": _tree, "halving-doubling": _halving}


@dataclass(frozen=True)
class Link:
    """Seconds to begin a message, and seconds for each of its bytes."""

    alpha_s: float
    beta_s: float

    @property
    def bandwidth_gb_s(self) -> float:
        return 1 / self.beta_s / 1e9 if self.beta_s else math.inf


@dataclass(frozen=True)
class Residual:
    """One measured size, and what the fitted model says of it; `relative` is model / measured - 1."""

    nbytes: int
    measured_s: float
    model_s: float

    @property
    def relative(self) -> float:
        return self.model_s / self.measured_s - 1


@dataclass(frozen=True)
class Fit:
    """A model fitted to a sweep over sizes on `ranks` ranks."""

    algorithm: str
    ranks: int
    link: Link
    residuals: tuple[Residual, ...]

    @property
    def worst(self) -> float:
        """The largest relative residual."""
        return max(abs(residual.relative) for residual in self.residuals)

    @property
    def typical(self) -> float:
        """The root of the mean square of the relative residuals."""
        return math.sqrt(sum(residual.relative**2 for residual in self.residuals) / len(self.residuals))


def predicted(algorithm: str, link: Link, ranks: int, nbytes: float) -> float:
    """Seconds for an allreduce; between one rank it costs nothing."""
    if ranks < 2:
        return 0.0
    messages, parts = ALGORITHMS[algorithm](ranks)
    return messages * link.alpha_s + parts * nbytes * link.beta_s


def fit(algorithm: str, ranks: int, sweep: Sequence[tuple[int, float]]) -> Fit:
    """The link that makes the model nearest to (bytes, seconds), in relative terms, so that small sizes count too.

    Neither alpha nor beta comes out negative: where the best one would, it is 0 and the other is fitted alone.
    """
    messages, parts = ALGORITHMS[algorithm](ranks)
    first = [messages] * len(sweep)
    second = [parts * nbytes for nbytes, _ in sweep]
    target = [seconds for _, seconds in sweep]
    alpha, beta = least_squares(first, second, target, _relative)
    if alpha < 0:
        alpha, beta = 0.0, _alone(second, target)
    elif beta < 0:
        alpha, beta = _alone(first, target), 0.0
    link = Link(alpha, beta)
    residuals = [Residual(nbytes, seconds, predicted(algorithm, link, ranks, nbytes)) for nbytes, seconds in sweep]
    return Fit(algorithm, ranks, link, tuple(residuals))


def _relative(seconds: float) -> float:
    return 1 / seconds**2


def _alone(counts: Sequence[float], target: Sequence[float]) -> float:
    """The factor for which factor * counts is nearest to the target in relative terms."""
    parts = [count / seconds for count, seconds in zip(counts, target, strict=True)]
    return sum(parts) / sum(part * part for part in parts)


@dataclass(frozen=True)
class Outlook:
    """A training step on `ranks` ranks: what its allreduces cost one after another, and the step's bounds.

    `limit_s` is max(compute, communication), which full overlap reaches at best; `serial_s` is their sum, without any.
    """

    ranks: int
    algorithm: str
    communication_s: float
    limit_s: float
    serial_s: float
    efficiency: float  # compute / limit: 1 where communication hides completely


def outlook(algorithm: str, link: Link, ranks: int, nbytes: int, compute_s: float, buckets: int) -> Outlook:
    """The step whose gradients of `nbytes` travel in `buckets` equal pieces."""
    each = predicted(algorithm, link, ranks, nbytes / buckets)
    communication = buckets * each
    limit = max(compute_s, communication)
    return Outlook(ranks, algorithm, communication, limit, compute_s + communication, compute_s / limit)

"""`dualdist bench scale`: an alpha-beta model of allreduce, what it predicts for many ranks, and its check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dualdist.bench import allreduce
from dualdist.bench import step as bench_step
from dualdist.bench.cases import AllreduceOptions, StepOptions
from dualdist.bench.jobs import MeasurementSettings, PlannedJob, RunConfig
from dualdist.bench.report import FigureTable, milliseconds, size_words
from dualdist.bench.statistics import least_squares
from dualdist.errors import UsageError
from dualdist.launch.launchers import Site

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
class LinkModel:
    """Seconds to begin a message, and seconds for each of its bytes."""

    alpha_s: float
    beta_s: float

    @property
    def bandwidth_gb_s(self) -> float:
        return 1 / self.beta_s / 1e9 if self.beta_s else math.inf


@dataclass(frozen=True)
class ModelResidual:
    """One measured size, and what the fitted model says of it; `relative` is model / measured - 1."""

    nbytes: int
    measured_s: float
    model_s: float

    @property
    def relative(self) -> float:
        return self.model_s / self.measured_s - 1


@dataclass(frozen=True)
class FittedModel:
    """A model fitted to a sweep over sizes on `ranks` ranks."""

    algorithm: str
    ranks: int
    link: LinkModel
    residuals: tuple[ModelResidual, ...]

    @property
    def worst(self) -> float:
        """The largest relative residual."""
        return max(abs(residual.relative) for residual in self.residuals)

    @property
    def typical(self) -> float:
        """The root of the mean square of the relative residuals."""
        return math.sqrt(sum(residual.relative**2 for residual in self.residuals) / len(self.residuals))


def predicted(algorithm: str, link: LinkModel, ranks: int, nbytes: float) -> float:
    """Seconds for an allreduce; between one rank it costs nothing."""
    if ranks < 2:
        return 0.0
    messages, parts = ALGORITHMS[algorithm](ranks)
    return messages * link.alpha_s + parts * nbytes * link.beta_s


def fit(algorithm: str, ranks: int, sweep: Sequence[tuple[int, float]]) -> FittedModel:
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
    link = LinkModel(alpha, beta)
    residuals = [ModelResidual(nbytes, seconds, predicted(algorithm, link, ranks, nbytes)) for nbytes, seconds in sweep]
    return FittedModel(algorithm, ranks, link, tuple(residuals))


def _relative(seconds: float) -> float:
    return 1 / seconds**2


def _alone(counts: Sequence[float], target: Sequence[float]) -> float:
    """The factor for which factor * counts is nearest to the target in relative terms."""
    parts = [count / seconds for count, seconds in zip(counts, target, strict=True)]
    return sum(parts) / sum(part * part for part in parts)


@dataclass(frozen=True)
class StepPrediction:
    """A training step on `ranks` ranks: what its allreduces cost one after another, and the step's bounds.

    `limit_s` is max(compute, communication), which full overlap reaches at best; `serial_s` is their sum, without any.
    """

    ranks: int
    algorithm: str
    communication_s: float
    limit_s: float
    serial_s: float
    efficiency: float  # compute / limit: 1 where communication hides completely


def outlook(algorithm: str, link: LinkModel, ranks: int, nbytes: int, compute_s: float, buckets: int) -> StepPrediction:
    """The step whose gradients of `nbytes` travel in `buckets` equal pieces."""
    each = predicted(algorithm, link, ranks, nbytes / buckets)
    communication = buckets * each
    limit = max(compute_s, communication)
    return StepPrediction(ranks, algorithm, communication, limit, compute_s + communication, compute_s / limit)


BUCKET_BYTES = 25 << 20
CALL = "dualdist_"  # whose times are fitted
UNKNOWN = (
    "what this cannot know: a network (measured links are those inside this host), how ranks share its cards and "
    "switches, several hosts' placement, libraries that change algorithm with size and ranks, ranks that are late, and "
    "more ranks than cores, which slow each other here as they would not on hosts of their own"
)
MODEL = (
    "T = a alpha + b n beta (Hockney 1994; Thakur, Rabenseifner and Gropp 2005); the cost of adding up is in beta, and "
    "all that a call costs beside its bytes is in alpha"
)


@dataclass(frozen=True)
class ScaleOptions:
    """What is asked: predictions for `ranks`, those up to `measured_up_to` measured too, unless the link is given.

    Without `compute_s` the model's step is measured on one rank; without `nbytes` its gradients count.
    """

    ranks: tuple[int, ...]
    measured_up_to: int
    model: str
    link: LinkModel | None = None
    compute_s: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if not self.ranks or any(ranks < 2 for ranks in self.ranks):
            raise UsageError(f"ranks {list(self.ranks)}: expected numbers of 2 or more, as 2,4,8,64")
        if (self.compute_s is None) != (self.nbytes is None):
            raise UsageError("--compute-ms and --bytes describe one step together: give both, or neither")
        if self.link is None and self.measured_up_to < min(self.ranks):
            raise UsageError(
                f"nothing to fit: no number of --ranks is within --measure-up-to {self.measured_up_to}; "
                "or give --alpha-us and --beta-gb-s"
            )

    @property
    def measured(self) -> tuple[int, ...]:
        return tuple(ranks for ranks in self.ranks if ranks <= self.measured_up_to) if self.link is None else ()


def plan(
    place: RunConfig,
    options: ScaleOptions,
    sweep: AllreduceOptions,
    setting: MeasurementSettings,
    site: Site,
    folder: Path,
) -> Iterator[PlannedJob]:
    """A sweep for every number of ranks that is measured, and one rank's step where its time was not given."""
    for ranks in options.measured:
        yield from allreduce.plan([place], sweep, replace(setting, ranks=ranks), site, folder, launches=1)
    if options.compute_s is None:
        step = [StepOptions(options.model, ("none",), rounds=min(5, sweep.rounds))]
        alone = replace(setting, ranks=1)
        native = [RunConfig("native", None, "torchrun")]
        yield from bench_step.plan(native, step, alone, site, folder, launches=1, with_memory=False)


def judge(done: Sequence[tuple[PlannedJob, list[dict[str, Any]]]], options: ScaleOptions) -> dict[str, Any]:
    """The fits, their check against what was measured, and the predictions, where there is all that they need."""
    sweeps = allreduce.judge([each for each in done if "ranks" in each[0].tags])
    steps = bench_step.judge([each for each in done if "model" in each[0].tags])
    compute_s, nbytes = options.compute_s, options.nbytes
    if steps:
        compute_s = steps[0]["contenders"]["none"]["seconds"]["value"]
        nbytes = steps[0]["gradient_bytes"]
    measured = {sweep["ranks"]: _points(sweep) for sweep in sweeps}
    fits = {(name, ranks): fit(name, ranks, points) for ranks, points in measured.items() for name in ALGORITHMS}
    base = min(measured) if measured else None
    if options.link is not None:
        links = dict.fromkeys(ALGORITHMS, options.link)
    else:
        links = {} if base is None else {name: fits[name, base].link for name in ALGORITHMS}
    buckets = max(1, -(-(nbytes or 0) // BUCKET_BYTES))
    return {
        "sweeps": sweeps,
        "fitted_on": base,
        "fits": [
            {
                "algorithm": found.algorithm,
                "ranks": found.ranks,
                **_link(found.link),
                "typical_residual": found.typical,
                "worst_residual": found.worst,
                "residuals": [{**asdict(each), "relative": each.relative} for each in found.residuals],
            }
            for found in fits.values()
        ],
        "links": {name: _link(link) for name, link in links.items()},
        "checks": [
            {
                "algorithm": name,
                "ranks": ranks,
                "bytes": size,
                "measured_s": seconds,
                "predicted_s": predicted(name, links[name], ranks, size),
            }
            for ranks, points in measured.items()
            if ranks != base
            for name in ALGORITHMS
            for size, seconds in points
        ],
        "step": {
            "model": options.model if steps else None,
            "compute_s": compute_s,
            "gradient_bytes": nbytes,
            "buckets": buckets,
        },
        "outlook": [
            asdict(outlook(name, links[name], ranks, nbytes, compute_s, buckets))
            for ranks in options.ranks
            for name in links
            if compute_s is not None and nbytes is not None
        ],
    }


def _points(sweep: dict[str, Any]) -> list[tuple[int, float]]:
    return [(size["bytes"], size["calls"][CALL]["seconds"]["value"]) for size in sweep["sizes"]]


def _link(link: LinkModel) -> dict[str, float]:
    return {"alpha_us": link.alpha_s * 1e6, "beta_gb_s": link.bandwidth_gb_s}


def tables(result: dict[str, Any]) -> Iterator[FigureTable]:
    """The fits, each with its residuals; the check; the outlook."""
    if result["fits"]:
        yield _fits(result)
        yield from _residuals(result)
    if result["checks"]:
        yield _checks(result)
    if result["outlook"]:
        yield _outlook(result)


def _fits(result: dict[str, Any]) -> FigureTable:
    sweep = result["sweeps"][0]
    return FigureTable(
        f"alpha-beta model fitted to dd.allreduce_, {sweep['backend']} over {sweep['transport']}, {sweep['launcher']}",
        ("algorithm", "ranks", "alpha us", "1 / beta GB/s", "typical residual", "worst residual"),
        tuple(
            (
                found["algorithm"],
                str(found["ranks"]),
                f"{found['alpha_us']:.1f}",
                f"{found['beta_gb_s']:.3f}",
                f"{found['typical_residual']:.0%}",
                f"{found['worst_residual']:.0%}",
            )
            for found in result["fits"]
        ),
        (MODEL, *(f"machine at {s['ranks']} ranks: {s['noise']['words']}" for s in result["sweeps"])),
    )


def _residuals(result: dict[str, Any]) -> Iterator[FigureTable]:
    found = next(each for each in result["fits"] if each["ranks"] == result["fitted_on"])
    yield FigureTable(
        f"residuals of the {found['algorithm']} model on the {found['ranks']} ranks it was fitted to",
        ("size", "measured us", "model us", "model / measured - 1"),
        tuple(
            (
                size_words(each["nbytes"]),
                f"{each['measured_s'] * 1e6:.1f}",
                f"{each['model_s'] * 1e6:.1f}",
                f"{each['relative']:+.0%}",
            )
            for each in found["residuals"]
        ),
        ("two ranks cannot tell the algorithms apart: with them all three give the same times",)
        if result["fitted_on"] == 2
        else (),
    )


def _checks(result: dict[str, Any]) -> FigureTable:
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for check in result["checks"]:
        rows.setdefault((check["ranks"], check["bytes"]), {})[check["algorithm"]] = check
    return FigureTable(
        f"predicted from {result['fitted_on']} ranks, and measured here",
        ("ranks, size", "measured us", *(f"{name}: predicted / measured" for name in ALGORITHMS)),
        tuple(
            (
                f"{ranks}, {size_words(nbytes)}",
                f"{by_name['ring']['measured_s'] * 1e6:.1f}",
                *(f"{by_name[name]['predicted_s'] / by_name[name]['measured_s']:.2f}" for name in ALGORITHMS),
            )
            for (ranks, nbytes), by_name in rows.items()
        ),
    )


def _outlook(result: dict[str, Any]) -> FigureTable:
    step = result["step"]
    rows: dict[int, dict[str, Any]] = {}
    for each in result["outlook"]:
        rows.setdefault(each["ranks"], {})[each["algorithm"]] = each
    link = ", ".join(f"{k} {v['alpha_us']:.1f} us and {v['beta_gb_s']:.3f} GB/s" for k, v in result["links"].items())
    return FigureTable(
        f"outlook for {step['model'] or 'the given step'}: compute {milliseconds(step['compute_s'])} ms a step, "
        f"{size_words(step['gradient_bytes'])} of gradients in {step['buckets']} bucket(s)",
        ("ranks", *(f"{name}: comm ms, limit ms, efficiency" for name in ALGORITHMS)),
        tuple(
            (
                str(ranks),
                *(
                    f"{milliseconds(each['communication_s'])}, {milliseconds(each['limit_s'])}, "
                    f"{each['efficiency']:.0%}"
                    for each in (by_name[name] for name in ALGORITHMS)
                ),
            )
            for ranks, by_name in rows.items()
        ),
        (
            f"links: {link}",
            "limit: max(compute, communication), which complete overlap would reach; efficiency: compute / limit",
            UNKNOWN,
        ),
    )

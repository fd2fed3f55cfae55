"""`dualdist bench scale`: an alpha-beta model of allreduce, fitted here, validated, and applied to many ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dualdist.bench import allreduce
from dualdist.bench import step as bench_step
from dualdist.bench.jobs import AllreduceOptions, Done, MeasurementSettings, PlannedJob, RunConfig, StepOptions
from dualdist.bench.report import ReportTable, format_ms, format_size, format_us
from dualdist.errors import UsageError

# Note [alpha-beta model]
# An allreduce of n bytes between p ranks takes a(p) * alpha + b(p) * n * beta: alpha seconds of latency per message,
# beta seconds per byte (Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994). The cost of
# the reduction (gamma in the paper) is proportional to the bytes and is included in beta. The counts a and b are those
# of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1),
# 2005, section 4.5.
Counts = Callable[[int], tuple[float, float]]


def _ring(ranks: int) -> tuple[float, float]:
    """Reduce-scatter around the ring, then allgather: 2 (p - 1) messages of n / p bytes each."""
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks


def _tree(ranks: int) -> tuple[float, float]:
    """Recursive doubling: in each of log2 p rounds every rank exchanges all n bytes."""
    rounds = math.ceil(math.log2(ranks))
    return rounds, rounds


def _halving(ranks: int) -> tuple[float, float]:
    """Rabenseifner's algorithm, recursive halving, then doubling: about a tree's messages and a ring's bytes."""
    return 2 * math.ceil(math.log2(ranks)), 2 * (ranks - 1) / ranks


ALGORITHMS: dict[str, Counts] = {"ring": _ring, "tree": _tree, "halving-doubling": _halving}


@dataclass(frozen=True)
class LinkModel:
    """Latency in seconds per message and inverse bandwidth in seconds per byte."""

    alpha_s: float
    beta_s: float

    def __str__(self) -> str:
        bandwidth = 1 / self.beta_s / 1e9 if self.beta_s else math.inf
        return f"{self.alpha_s * 1e6:.1f} us and {bandwidth:.3f} GB/s"


def predict_allreduce(algorithm: str, link: LinkModel, ranks: int, nbytes: float) -> float:
    """Return the seconds of an allreduce; 0 for a single rank."""
    if ranks < 2:
        return 0.0
    messages, parts = ALGORITHMS[algorithm](ranks)
    return messages * link.alpha_s + parts * nbytes * link.beta_s


def fit_link(algorithm: str, ranks: int, sweep: Sequence[tuple[int, float]]) -> tuple[LinkModel, float, float]:
    """Fit alpha and beta to (bytes, seconds) by non-negative least squares of the relative errors.

    Also return the RMS and the largest of the residuals, which are model / measured - 1.
    """
    from scipy.optimize import lsq_linear  # nnls of SciPy 1.15, the last for Python 3.10, can be far from the minimum

    messages, parts = ALGORITHMS[algorithm](ranks)
    rows = [[messages / seconds, parts * nbytes / seconds] for nbytes, seconds in sweep]
    alpha, beta = lsq_linear(rows, [1.0] * len(rows), bounds=(0, math.inf), method="bvls").x
    link = LinkModel(float(alpha), float(beta))
    residuals = [predict_allreduce(algorithm, link, ranks, nbytes) / seconds - 1 for nbytes, seconds in sweep]
    return link, math.hypot(*residuals) / math.sqrt(len(residuals)), max(map(abs, residuals))


def predict_step(
    algorithm: str, link: LinkModel, ranks: int, nbytes: int, compute_s: float, buckets: int
) -> dict[str, Any]:
    """Predict the step whose `nbytes` of gradients are reduced in `buckets` of equal size, one after another."""
    communication = buckets * predict_allreduce(algorithm, link, ranks, nbytes / buckets)
    bound = max(compute_s, communication)  # with complete overlap
    return {
        "ranks": ranks,
        "algorithm": algorithm,
        "communication_s": communication,
        "overlapped_s": bound,
        "serial_s": compute_s + communication,
        "efficiency": compute_s / bound,
    }


BUCKET_BYTES = 25 << 20
CALL = "dualdist_"  # the call whose times are fitted
LIMITATIONS_NOTE = (
    "not modelled: a network (the fitted links are those within this host), ranks that share network cards and "
    "switches, placement over several hosts, libraries that change algorithm with size and ranks, stragglers, and "
    "more ranks than cores, which slow each other here but not on separate hosts"
)
MODEL_NOTE = (
    "T = a alpha + b n beta (Hockney 1994; Thakur, Rabenseifner and Gropp 2005); beta includes the reduction, alpha "
    "the constant cost of a call"
)


@dataclass(frozen=True)
class ScaleOptions:
    """Numbers of ranks to predict, of which those up to `measure_up_to` are measured too unless `link` is given.

    Without `compute_s` and `nbytes` the step of `model` is measured on one rank.
    """

    ranks: tuple[int, ...]
    measure_up_to: int
    model: str
    link: LinkModel | None = None
    compute_s: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if not self.ranks or any(ranks < 2 for ranks in self.ranks):
            raise UsageError(f"ranks {list(self.ranks)}: expected numbers of 2 or more, as 2,4,8,64")
        if (self.compute_s is None) != (self.nbytes is None):
            raise UsageError("--compute-ms and --bytes describe one step together: give both, or neither")
        if self.link is None and self.measure_up_to < min(self.ranks):
            raise UsageError(
                f"nothing to fit: no number of --ranks is within --measure-up-to {self.measure_up_to}; "
                "or give --alpha-us and --beta-gb-s"
            )

    @property
    def measured_ranks(self) -> tuple[int, ...]:
        return tuple(ranks for ranks in self.ranks if ranks <= self.measure_up_to) if self.link is None else ()


def plan_jobs(
    config: RunConfig,
    options: ScaleOptions,
    sweep: AllreduceOptions,
    settings: MeasurementSettings,
    folder: Path,
) -> Iterator[PlannedJob]:
    """Yield a sweep for every measured number of ranks, and the step on one rank unless its time was given."""
    for ranks in options.measured_ranks:
        yield from allreduce.plan_jobs([config], sweep, replace(settings, ranks=ranks), folder, launches=1)
    if options.compute_s is None:
        step = [StepOptions(options.model, ("none",), rounds=min(5, sweep.rounds))]
        alone, native = replace(settings, ranks=1), [RunConfig("native", None, "torchrun")]
        yield from bench_step.plan_jobs(native, step, alone, folder, launches=1, with_memory=False)


def summarize(done: Done, options: ScaleOptions) -> dict[str, Any]:
    """Return the fits, the first one's times beside those measured on each number of ranks, and the predictions."""
    sweeps = allreduce.summarize([each for each in done if "ranks" in each[0].tags])
    steps = bench_step.summarize([each for each in done if "model" in each[0].tags])
    compute_s, nbytes = options.compute_s, options.nbytes
    if steps:
        compute_s = steps[0]["contenders"]["none"]["seconds"]["value"]
        nbytes = steps[0]["gradient_bytes"]
    measured = {
        sweep["ranks"]: [(size["bytes"], size["calls"][CALL]["seconds"]["value"]) for size in sweep["sizes"]]
        for sweep in sweeps
    }
    fits = {(name, ranks): fit_link(name, ranks, points) for ranks, points in measured.items() for name in ALGORITHMS}
    base = min(measured, default=None)
    links = {name: options.link or fits[name, base][0] for name in ALGORITHMS if options.link or base is not None}
    buckets = max(1, -(-(nbytes or 0) // BUCKET_BYTES))
    return {
        "sweeps": sweeps,
        "fitted_on": base,
        "fits": [
            {"algorithm": name, "ranks": ranks, "link": asdict(link), "rms_residual": rms, "max_residual": largest}
            for (name, ranks), (link, rms, largest) in fits.items()
        ],
        "links": {name: asdict(link) for name, link in links.items()},
        "validation": [
            {
                "algorithm": name,
                "ranks": ranks,
                "bytes": size,
                "measured_s": seconds,
                "predicted_s": predict_allreduce(name, links[name], ranks, size),
            }
            for ranks, points in measured.items()
            for name in ALGORITHMS
            for size, seconds in points
        ],
        "step": {
            "model": options.model if steps else None,
            "compute_s": compute_s,
            "gradient_bytes": nbytes,
            "buckets": buckets,
        },
        "predictions": [
            predict_step(name, links[name], ranks, nbytes, compute_s, buckets)
            for ranks in options.ranks
            for name in links
            if compute_s is not None and nbytes is not None
        ],
    }


def tables(result: dict[str, Any]) -> Iterator[ReportTable]:
    if result["fits"]:
        yield _fits(result)
        yield _validation(result)
    if result["predictions"]:
        yield _predictions(result)


def _fits(result: dict[str, Any]) -> ReportTable:
    sweep = result["sweeps"][0]
    rows = (
        (
            fit["algorithm"],
            str(fit["ranks"]),
            str(LinkModel(**fit["link"])),
            f"{fit['rms_residual']:.0%}",
            f"{fit['max_residual']:.0%}",
        )
        for fit in result["fits"]
    )
    return ReportTable(
        f"alpha-beta model fitted to dd.allreduce_, {sweep['backend']} over {sweep['transport']}, {sweep['launcher']}",
        ("algorithm", "ranks", "alpha, 1 / beta", "RMS residual", "max residual"),
        tuple(rows),
        (MODEL_NOTE, *(f"machine at {s['ranks']} ranks: {s['noise']['summary']}" for s in result["sweeps"])),
    )


def _validation(result: dict[str, Any]) -> ReportTable:
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for each in result["validation"]:
        rows.setdefault((each["ranks"], each["bytes"]), {})[each["algorithm"]] = each
    return ReportTable(
        f"validation: as fitted on {result['fitted_on']} ranks, and measured here",
        ("ranks, size", "measured us", *(f"{name}: predicted / measured" for name in ALGORITHMS)),
        tuple(
            (
                f"{ranks}, {format_size(nbytes)}",
                format_us(by_name["ring"]["measured_s"]),
                *(f"{by_name[name]['predicted_s'] / by_name[name]['measured_s']:.2f}" for name in ALGORITHMS),
            )
            for (ranks, nbytes), by_name in rows.items()
        ),
        ("with two ranks all three algorithms take the same time",) if result["fitted_on"] == 2 else (),
    )


def _predictions(result: dict[str, Any]) -> ReportTable:
    step = result["step"]
    rows: dict[int, list[str]] = {}
    for each in result["predictions"]:
        cell = f"{format_ms(each['communication_s'])}, {format_ms(each['overlapped_s'])}, {each['efficiency']:.0%}"
        rows.setdefault(each["ranks"], []).append(cell)
    links = ", ".join(f"{name} {LinkModel(**link)}" for name, link in result["links"].items())
    return ReportTable(
        f"prediction for {step['model'] or 'the given step'}: compute {format_ms(step['compute_s'])} ms per step, "
        f"{format_size(step['gradient_bytes'])} of gradients in {step['buckets']} bucket(s)",
        ("ranks", *(f"{name}: comm ms, step ms, efficiency" for name in ALGORITHMS)),
        tuple((str(ranks), *cells) for ranks, cells in rows.items()),
        (
            f"links: {links}",
            "step: max(compute, communication), the bound with complete overlap; efficiency: compute / step",
            LIMITATIONS_NOTE,
        ),
    )

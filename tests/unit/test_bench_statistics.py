"""Ratios, confidence intervals and machine noise on samples with known properties; the alpha-beta model."""

import random

import pytest

from dualdist.bench.allreduce import algorithm_bandwidth, bus_bandwidth, sizes_up_to
from dualdist.bench.scale import ALGORITHMS, LinkModel, fit_link, predict_allreduce, predict_step
from dualdist.bench.statistics import (
    LOADED_CORES,
    PAIRED_RESAMPLES,
    RESAMPLES,
    bootstrap_median,
    foreign_cores,
    machine_noise,
    pooled_median,
    time_ratio,
)
from dualdist.utils.machine import CpuUse

ROUNDS = 15


def machine_load(seed: int, launches: int) -> list[list[float]]:
    """Load of each round, common to all contenders, that varies by a factor of two."""
    draw = random.Random(seed)
    return [[draw.uniform(1.0, 2.0) for _ in range(ROUNDS)] for _ in range(launches)]


def timings(load: list[list[float]], seconds: float, seed: int, jitter: float = 0.02) -> list[list[float]]:
    draw = random.Random(seed)
    return [[seconds * factor * draw.gauss(1.0, jitter) for factor in rounds] for rounds in load]


def compared(load: list[list[float]], slower: float, seed: int) -> dict[str, float]:
    unknown: list[list[float | None]] = [[None] * ROUNDS for _ in load]
    return time_ratio(timings(load, 0.1 * slower, seed), timings(load, 0.1, seed + 1), unknown)["median"]


def test_interval_of_a_contender_against_a_copy_contains_one_in_most_trials() -> None:
    found = [compared(machine_load(seed, 3), 1.0, 2 * seed + 1000) for seed in range(40)]
    # 95% of 40 is 38; resampling few launches is a little narrow.
    assert sum(each["low"] <= 1.0 <= each["high"] for each in found) >= 36


@pytest.mark.parametrize("slower", [1.05, 0.95])
def test_five_percent_are_detected_below_a_load_that_varies_twofold(slower: float) -> None:
    found = compared(machine_load(1, 3), slower, 2)
    assert found["low"] <= slower <= found["high"]
    assert not found["low"] <= 1.0 <= found["high"]
    assert found["value"] == pytest.approx(slower, abs=0.02)


def test_statistics_of_known_samples_are_exact() -> None:
    found = time_ratio([[2.0, 9.0, 4.0]], [[2.0, 3.0, 1.0]], [[0.0, 2 * LOADED_CORES, None]])
    assert found.pop("median")["value"] == 3.0
    assert found == {
        "min_ratio": 1.0, "ratio_of_minima": 2.0, "quiet_median": 2.5, "rounds": 3, "loaded_rounds": 1, "launches": 1
    }  # fmt: skip
    assert time_ratio([[1.0]], [[1.0]], [[True]])["quiet_median"] is None
    assert pooled_median([[1.0, 1.0, 9.0], [2.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]]) == 2.0
    assert machine_noise([[0.0]], [[1.0, 2.0, 3.0, 4.0, 5.0]])["spread"] == pytest.approx(2 / 3)


def test_bootstrap_resamples_launches_enough_and_alike_every_time() -> None:
    draw = random.Random(0)
    launches = [[draw.gauss(shift, 0.01) for _ in range(ROUNDS)] for shift in (0.96, 0.98, 1.0, 1.02, 1.04)]
    nested = bootstrap_median(launches)
    flat = bootstrap_median([[value for rounds in launches for value in rounds]])
    assert nested["high"] - nested["low"] > 1.3 * (flat["high"] - flat["low"])
    assert bootstrap_median(launches) == nested
    assert min(RESAMPLES, PAIRED_RESAMPLES) * 0.025 >= 50


@pytest.mark.parametrize(
    ("foreign", "baseline", "noisy"),
    [
        ([0.0, 0.01, 0.05, 0.02], [1.0, 1.01, 0.99, 1.0], False),
        ([0.0, 0.5, 0.5, 0.02], [1.0, 1.01, 0.99, 1.0], True),
        ([0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 1.0, 2.0], True),
        ([None, None, None, None], [1.0, 1.01, 0.99, 1.0], False),
    ],
)
def test_a_machine_is_noisy_by_foreign_load_or_by_spread(
    foreign: list[float | None], baseline: list[float], noisy: bool
) -> None:
    found = machine_noise([foreign], [baseline])
    assert (found["is_noisy"], found["summary"].startswith("NOISY" if noisy else "quiet")) == (noisy, True)
    assert found["loaded_rounds"] == sum(value is not None and value > LOADED_CORES for value in foreign)


LINK = LinkModel(25e-6, 1 / 2e9)
SIZES = sizes_up_to(16 << 20)


@pytest.mark.parametrize("ranks", [2, 4, 8, 6])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fit_recovers_the_link(algorithm: str, ranks: int) -> None:
    sweep = [(size, predict_allreduce(algorithm, LINK, ranks, size)) for size in SIZES]
    link, _, largest = fit_link(algorithm, ranks, sweep)
    assert (link.alpha_s, link.beta_s) == pytest.approx((LINK.alpha_s, LINK.beta_s))
    assert largest < 1e-9


def test_fit_recovers_the_link_from_noisy_timings_with_residuals() -> None:
    draw = random.Random(0)
    sweep = [(size, predict_allreduce("ring", LINK, 4, size) * draw.gauss(1, 0.05)) for size in SIZES]
    link, rms, largest = fit_link("ring", 4, sweep)
    assert (link.alpha_s, link.beta_s) == pytest.approx((LINK.alpha_s, LINK.beta_s), rel=0.1)
    assert 0.01 < rms < min(0.1, largest)


@pytest.mark.parametrize(
    ("sweep", "zero"), [([(8, 1e-9), (1 << 20, 1e-3)], "alpha_s"), ([(8, 1.0), (64, 0.5)], "beta_s")]
)
def test_fitted_parameters_are_not_negative(sweep: list[tuple[int, float]], zero: str) -> None:
    link, *_ = fit_link("ring", 2, sweep)
    assert getattr(link, zero) == pytest.approx(0.0, abs=1e-8)
    assert min(link.alpha_s, link.beta_s) >= 0.0


@pytest.mark.parametrize(
    ("algorithm", "ranks", "seconds"),
    [
        # Bandwidth 8 bytes/s, latency 1 s: counts by hand from Thakur et al., section 4.5.
        ("ring", 4, 6 * 1.0 + 6 / 4 * 16 / 8),
        ("tree", 4, 2 * 1.0 + 2 * 16 / 8),
        ("halving-doubling", 4, 4 * 1.0 + 6 / 4 * 16 / 8),
        ("tree", 5, 3 * 1.0 + 3 * 16 / 8),
        ("ring", 1, 0.0),
        ("tree", 1, 0.0),
    ],
)
def test_costs_are_those_of_the_papers(algorithm: str, ranks: int, seconds: float) -> None:
    assert predict_allreduce(algorithm, LinkModel(1.0, 1 / 8), ranks, 16) == pytest.approx(seconds)


def test_a_step_is_bounded_by_the_larger_of_compute_and_communication() -> None:
    hidden = predict_step("ring", LINK, 8, 1 << 20, 0.5, 4)
    assert (hidden["overlapped_s"], hidden["efficiency"]) == (0.5, 1.0)
    assert hidden["communication_s"] == pytest.approx(4 * predict_allreduce("ring", LINK, 8, 1 << 18))
    bound = predict_step("ring", LINK, 8, 1 << 30, 0.5, 4)
    assert bound["overlapped_s"] == bound["communication_s"] > 0.5
    assert bound["efficiency"] == pytest.approx(0.5 / bound["communication_s"])
    assert bound["serial_s"] == 0.5 + bound["communication_s"]


def test_bandwidths_are_those_of_nccl_tests_over_sizes_from_8_bytes() -> None:
    assert algorithm_bandwidth(10**9, 0.5) == 2.0
    assert [bus_bandwidth(10**9, 0.5, ranks) for ranks in (1, 2, 8)] == [0.0, 2.0, 3.5]
    sizes = sizes_up_to(256 << 20)
    assert (sizes[0], sizes[-1]) == (8, 256 << 20)
    assert {64 << 10, 1 << 20, 25 << 20} < set(sizes)
    assert sizes_up_to(8) == (8,)


def test_foreign_cores_are_the_machines_use_minus_all_ranks() -> None:
    ranks = [CpuUse(2.0, 3.5, 1.5), CpuUse(2.1, 3.6, 1.0)]
    assert foreign_cores(ranks) == pytest.approx(0.5)
    assert foreign_cores([CpuUse(2.0, 1.0, 1.5)]) == 0.0
    assert foreign_cores([CpuUse(2.0, None, 1.5)]) is None

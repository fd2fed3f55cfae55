"""Ratios, confidence intervals and machine noise, on samples with known properties."""

from __future__ import annotations

import random
import statistics as stdlib

import pytest

from dualdist.bench.statistics import (
    LOADED_CORES,
    PAIRED_RESAMPLES,
    RESAMPLES,
    bootstrap_median,
    machine_noise,
    pooled_median,
    time_ratio,
)

ROUNDS = 15


def machine_load(seed: int, launches: int) -> list[list[float]]:
    """Load of each round, common to all contenders, that varies by a factor of two."""
    draw = random.Random(seed)
    return [[draw.uniform(1.0, 2.0) for _ in range(ROUNDS)] for _ in range(launches)]


def timings(load: list[list[float]], seconds: float, seed: int, jitter: float = 0.02) -> list[list[float]]:
    draw = random.Random(seed)
    return [[seconds * factor * draw.gauss(1.0, jitter) for factor in rounds] for rounds in load]


def test_interval_of_a_contender_against_a_copy_contains_one_in_most_trials() -> None:
    holds = 0
    for seed in range(40):
        load = machine_load(seed, 3)
        found = time_ratio(timings(load, 0.1, 2 * seed + 1000), timings(load, 0.1, 2 * seed + 1001)).median
        holds += found.low <= 1.0 <= found.high
    assert holds >= 36  # 95% of 40 is 38; resampling few launches is a little narrow


@pytest.mark.parametrize("slower", [1.05, 0.95])
def test_five_percent_are_detected_below_a_load_that_varies_twofold(slower: float) -> None:
    load = machine_load(1, 3)
    found = time_ratio(timings(load, 0.1 * slower, 2), timings(load, 0.1, 3)).median
    assert found.low <= slower <= found.high
    assert not found.low <= 1.0 <= found.high
    assert found.value == pytest.approx(slower, abs=0.02)


def test_medians_of_separate_rounds_do_not_detect_five_percent() -> None:
    """Why ratios are taken round by round: these two were not measured under the same load."""
    over, under = timings(machine_load(1, 1), 0.105, 2)[0], timings(machine_load(9, 1), 0.1, 3)[0]
    assert abs(stdlib.median(over) / stdlib.median(under) - 1.05) > 0.02


def test_a_ratio_has_minimum_ratio_of_minima_and_median_of_quiet_rounds() -> None:
    found = time_ratio([[2.0, 9.0, 4.0]], [[2.0, 3.0, 1.0]], [[False, True, False]])
    assert (found.median.value, found.min_ratio, found.ratio_of_minima, found.quiet_median) == (3.0, 1.0, 2.0, 2.5)
    assert (found.rounds, found.loaded_rounds, found.launches) == (3, 1, 1)
    assert time_ratio([[1.0]], [[1.0]], [[True]]).quiet_median is None


def test_launches_are_pooled_by_the_median_of_their_medians() -> None:
    assert pooled_median([[1.0, 1.0, 9.0], [2.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]]) == 2.0


def test_interval_over_different_launches_is_wider_than_over_their_rounds_in_one() -> None:
    draw = random.Random(0)
    launches = [[draw.gauss(shift, 0.01) for _ in range(ROUNDS)] for shift in (0.96, 0.98, 1.0, 1.02, 1.04)]
    nested = bootstrap_median(launches)
    flat = bootstrap_median([[value for rounds in launches for value in rounds]])
    assert nested.high - nested.low > 1.3 * (flat.high - flat.low)


def test_bootstrap_is_deterministic_and_has_enough_resamples_for_its_percentiles() -> None:
    assert bootstrap_median([[1.0, 2.0, 3.0]]) == bootstrap_median([[1.0, 2.0, 3.0]])
    assert min(RESAMPLES, PAIRED_RESAMPLES) * 0.025 >= 50


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert machine_noise([[0.0]], [[1.0, 2.0, 3.0, 4.0, 5.0]]).spread == pytest.approx(2 / 3)


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
    assert found.is_noisy is noisy
    assert str(found).startswith("NOISY" if noisy else "quiet")
    assert found.loaded_rounds == sum(value is not None and value > LOADED_CORES for value in foreign)

"""Ratios, their intervals and the judgement of noise, on samples whose truth is known."""

from __future__ import annotations

import random
import statistics as stdlib

import pytest

from dualdist.bench.statistics import LOADED_CORES, estimate, least_squares, noise, pooled, quantile, ratio, spread

ROUNDS = 15


def machine_load(seed: int, launches: int) -> list[list[float]]:
    """What every contender of a round suffers alike: it swings by a factor of two."""
    draw = random.Random(seed)
    return [[draw.uniform(1.0, 2.0) for _ in range(ROUNDS)] for _ in range(launches)]


def timings(load: list[list[float]], seconds: float, seed: int, jitter: float = 0.02) -> list[list[float]]:
    draw = random.Random(seed)
    return [[seconds * swing * draw.gauss(1.0, jitter) for swing in rounds] for rounds in load]


def test_same_contender_twice_gives_an_interval_around_one_in_most_trials() -> None:
    holds = 0
    for seed in range(40):
        load = machine_load(seed, 3)
        found = ratio(timings(load, 0.1, 2 * seed + 1000), timings(load, 0.1, 2 * seed + 1001)).median
        holds += found.low <= 1.0 <= found.high
    assert holds >= 36  # 95% of 40 is 38; resampling few launches is a little narrow


@pytest.mark.parametrize("slower", [1.05, 0.95])
def test_five_percent_are_found_below_a_load_that_swings_twofold(slower: float) -> None:
    load = machine_load(1, 3)
    found = ratio(timings(load, 0.1 * slower, 2), timings(load, 0.1, 3)).median
    assert found.low <= slower <= found.high
    assert not found.low <= 1.0 <= found.high
    assert found.value == pytest.approx(slower, abs=0.02)


def test_medians_of_the_timings_would_not_have_found_it() -> None:
    """Why ratios are taken round by round: the two were not measured under the same load."""
    over, under = timings(machine_load(1, 1), 0.105, 2)[0], timings(machine_load(9, 1), 0.1, 3)[0]
    assert abs(stdlib.median(over) / stdlib.median(under) - 1.05) > 0.02


def test_a_ratio_tells_minimum_best_and_what_was_quiet() -> None:
    found = ratio([[2.0, 9.0, 4.0]], [[2.0, 3.0, 1.0]], [[False, True, False]])
    assert (found.median.value, found.minimum, found.best, found.quiet) == (3.0, 1.0, 2.0, 2.5)
    assert (found.rounds, found.loaded, found.launches) == (3, 1, 1)
    assert ratio([[1.0]], [[1.0]], [[True]]).quiet is None


def test_launches_are_pooled_by_the_median_of_their_medians() -> None:
    assert pooled([[1.0, 1.0, 9.0], [2.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]]) == 2.0


def test_interval_of_launches_that_differ_is_wider_than_that_of_their_rounds_in_one() -> None:
    draw = random.Random(0)
    launches = [[draw.gauss(shift, 0.01) for _ in range(ROUNDS)] for shift in (0.96, 0.98, 1.0, 1.02, 1.04)]
    together = estimate(launches)
    flat = estimate([[value for rounds in launches for value in rounds]])
    assert together.high - together.low > 1.3 * (flat.high - flat.low)


def test_estimate_is_the_same_every_time() -> None:
    assert estimate([[1.0, 2.0, 3.0]]) == estimate([[1.0, 2.0, 3.0]])


def test_quantiles_are_the_standard_librarys() -> None:
    values = sorted(random.Random(4).random() for _ in range(23))
    quartiles = stdlib.quantiles(values, n=4, method="inclusive")
    assert [quantile(values, part) for part in (0.25, 0.5, 0.75)] == pytest.approx(quartiles)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("foreign", "reference", "noisy"),
    [
        ([0.0, 0.01, 0.05, 0.02], [1.0, 1.01, 0.99, 1.0], False),
        ([0.0, 0.5, 0.5, 0.02], [1.0, 1.01, 0.99, 1.0], True),
        ([0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 1.0, 2.0], True),
        ([None, None, None, None], [1.0, 1.01, 0.99, 1.0], False),
    ],
)
def test_a_noisy_machine_is_called_noisy(foreign: list[float | None], reference: list[float], noisy: bool) -> None:
    found = noise([foreign], [reference])
    assert found.is_noisy is noisy
    assert str(found).startswith("NOISY" if noisy else "quiet")
    assert found.loaded == sum(value is not None and value > LOADED_CORES for value in foreign)


def test_least_squares_finds_the_plane_it_is_given() -> None:
    first, second = [1.0, 1.0, 2.0, 5.0], [8.0, 64.0, 1024.0, 3.0]
    target = [3.0 * a + 0.25 * b for a, b in zip(first, second, strict=True)]
    assert least_squares(first, second, target, lambda t: 1 / t**2) == pytest.approx((3.0, 0.25))

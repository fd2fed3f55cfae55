"""Ratios, confidence intervals and machine noise on samples with known properties."""

import random

import pytest

from dualdist.bench.allreduce import algorithm_bandwidth, bus_bandwidth, sizes_up_to
from dualdist.bench.statistics import (
    LOADED_CORES,
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
        "quiet_median": 2.5, "rounds": 3, "loaded_rounds": 1, "launches": 1
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
    assert RESAMPLES * 0.025 >= 50


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

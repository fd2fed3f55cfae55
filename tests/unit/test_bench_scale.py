"""The alpha-beta model: fits recover known parameters, and the formulas are those of the papers."""

from __future__ import annotations

import random

import pytest

from dualdist.bench.allreduce import algorithm_bandwidth, bus_bandwidth
from dualdist.bench.options import sizes_up_to
from dualdist.bench.scale import ALGORITHMS, LinkModel, fit_link, predict_allreduce, predict_step

LINK = LinkModel(25e-6, 1 / 2e9)
SIZES = sizes_up_to(16 << 20)


@pytest.mark.parametrize("ranks", [2, 4, 8, 6])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fit_recovers_the_link(algorithm: str, ranks: int) -> None:
    found = fit_link(algorithm, ranks, [(size, predict_allreduce(algorithm, LINK, ranks, size)) for size in SIZES])
    assert found.link.alpha_s == pytest.approx(LINK.alpha_s)
    assert found.link.beta_s == pytest.approx(LINK.beta_s)
    assert found.max_residual < 1e-9


def test_fit_recovers_the_link_from_noisy_timings_with_residuals() -> None:
    draw = random.Random(0)
    found = fit_link(
        "ring", 4, [(size, predict_allreduce("ring", LINK, 4, size) * draw.gauss(1, 0.05)) for size in SIZES]
    )
    assert found.link.alpha_s == pytest.approx(LINK.alpha_s, rel=0.1)
    assert 1 / found.link.beta_s == pytest.approx(2e9, rel=0.1)
    assert 0.01 < found.rms_residual < 0.1
    assert found.max_residual >= found.rms_residual


@pytest.mark.parametrize(
    ("sweep", "zero"), [([(8, 1e-9), (1 << 20, 1e-3)], "alpha_s"), ([(8, 1.0), (64, 0.5)], "beta_s")]
)
def test_fitted_parameters_are_not_negative(sweep: list[tuple[int, float]], zero: str) -> None:
    link = fit_link("ring", 2, sweep).link
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


def test_latency_dominates_a_large_ring_and_bytes_a_large_tree() -> None:
    assert predict_allreduce("ring", LINK, 4096, 8) > 100 * predict_allreduce("tree", LINK, 4096, 8)
    assert predict_allreduce("tree", LINK, 4096, 1 << 30) > 5 * predict_allreduce("ring", LINK, 4096, 1 << 30)


def test_a_step_is_bounded_by_the_larger_of_compute_and_communication() -> None:
    hidden = predict_step("ring", LINK, 8, 1 << 20, 0.5, 4)
    assert hidden.overlapped_s == 0.5
    assert hidden.efficiency == 1.0
    assert hidden.communication_s == pytest.approx(4 * predict_allreduce("ring", LINK, 8, 1 << 18))
    bound = predict_step("ring", LINK, 8, 1 << 30, 0.5, 4)
    assert bound.overlapped_s == bound.communication_s > 0.5
    assert bound.efficiency == pytest.approx(0.5 / bound.communication_s)
    assert bound.serial_s == 0.5 + bound.communication_s


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert algorithm_bandwidth(10**9, 0.5) == 2.0
    assert bus_bandwidth(10**9, 0.5, 2) == 2.0
    assert bus_bandwidth(10**9, 0.5, 8) == 3.5
    assert bus_bandwidth(10**9, 0.5, 1) == 0.0


def test_a_sweep_covers_8_bytes_to_the_largest_and_the_common_sizes() -> None:
    assert sizes_up_to(256 << 20)[0] == 8
    assert sizes_up_to(256 << 20)[-1] == 256 << 20
    assert {8, 64 << 10, 1 << 20, 25 << 20} <= set(sizes_up_to(256 << 20))
    assert sizes_up_to(8) == (8,)

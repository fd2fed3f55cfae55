"""The verdict of a comparison: equivalence, significance, the schedule of launches, and metrics."""

import json
import math
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from comparisons import failed_launch, launch, launches, rank

from dualdist.bench.compare.launches import Launch, RankRecord, foreign_cores_beside
from dualdist.bench.compare.metrics import ComparisonResult, summarize
from dualdist.bench.compare.runner import Contender, LaunchSchedule, draw_order, ordered_checks, record_error
from dualdist.bench.compare.verdict import Verdict, check_equivalence, judge, rank_by_speed
from dualdist.bench.jobs import DUALDIST, RunConfig
from dualdist.bench.statistics import MIN_LAUNCHES

TRIALS = 200


def judged(**steps_s: list[float]) -> Verdict:
    found = {name: launches(name, values) for name, values in steps_s.items()}
    return judge(found, check_equivalence(found))


def drawn(seed: int, runs: int, factor: float = 1.0, *, disturbed: float = 0.0) -> list[float]:
    """Median steps of launches with 2% standard deviation; some are disturbed by 30%, and each round has its load."""
    draw = random.Random(seed)
    disturbance = [draw.gauss(1, 0.02) * (1.3 if draw.random() < disturbed else 1) for _ in range(runs)]
    return [0.1 * factor * (1 + number % 3) * each for number, each in enumerate(disturbance)]


@pytest.mark.parametrize(("runs", "disturbed"), [(6, 0.0), (7, 0.0), (9, 0.0), (9, 0.15), (15, 0.0)])
def test_a_copy_of_a_contender_shows_no_difference_in_95_percent_of_comparisons(runs: int, disturbed: float) -> None:
    def trial(seed: int) -> Verdict:
        return judged(**{name: drawn(2 * seed + i, runs, disturbed=disturbed) for i, name in enumerate("ab")})

    found = [trial(seed) for seed in range(TRIALS)]
    wrong = sum(each.kind == "faster" for each in found)
    assert all(each.kind in ("faster", "no difference") for each in found)
    # 5% of 200 is 10; an interval of 95% exceeds 14 in 8% of cases.
    assert wrong <= 14


@pytest.mark.parametrize(("runs", "found_in"), [(9, 0.9), (15, 0.97)])
def test_a_contender_that_is_5_percent_slower_is_detected(runs: int, found_in: float) -> None:
    found = [judged(a=drawn(2 * seed, runs), b=drawn(2 * seed + 1, runs, 1.05)) for seed in range(TRIALS)]
    assert sum((each.kind, each.winner) == ("faster", "a") for each in found) >= found_in * TRIALS


def test_the_best_of_five_equal_contenders_does_not_win() -> None:
    found = [judged(**{name: drawn(5 * seed + i, 9) for i, name in enumerate("abcde")}) for seed in range(TRIALS)]
    assert sum(each.kind == "faster" for each in found) <= 14


def test_the_sentence_has_ratio_interval_and_number_of_launches() -> None:
    found = judged(a=[1.31, 1.29, 1.30, 1.31, 1.36, 1.27, 1.33, 1.31, 1.31], b=[1.0] * 9)
    assert found.sentence == "b is 1.31x faster than a (95% interval 1.29 to 1.33, 9 launches each)"
    same = judged(a=[1.0, 1.01, 0.99] * 3, b=[1.0, 0.99, 1.01] * 3)
    assert same.sentence.startswith("no significant difference between ")
    alone = judged(a=[1.0] * 9)
    assert alone.sentence == "a is the only candidate that ran here"
    assert [each.headline for each in (same, alone)] == ["No clear winner", "Only one candidate"]
    assert found.headline == "b is 1.31x faster"
    few = judged(a=[1.0] * 5, b=[9.0] * 5)
    assert (few.kind, "5 launches are too few" in few.sentence) == ("too few", True)
    assert judged(a=[1.0] * 6, b=[9.0] * 6).kind == "faster"
    assert 1 - 2 / 2**MIN_LAUNCHES > 0.95 > 1 - 2 / 2 ** (MIN_LAUNCHES - 1)
    assert judged().kind == "nothing"


def test_contenders_are_compared_by_the_rounds_in_which_both_ran() -> None:
    one = launches("a", [1.0] * 8)
    other = [launch("b", number, 2.0) for number in range(2, 9)]
    found = judge({"a": one, "b": other}, check_equivalence({"a": one}))
    assert (found.ratio.launches, found.ratio.value) == (6, 2.0)
    found = {"a": launches("a", [1.0, 5.0] * 3), "b": launches("b", [0.9, 4.5] * 3), "c": launches("c", [2.0] * 6)}
    assert rank_by_speed(found)[0] == "b"


def test_different_models_make_the_comparison_invalid() -> None:
    found = {"a": launches("a", [1.0] * 9), "b": launches("b", [9.0] * 9), "c": launches("c", [9.0] * 9)}
    found["a"][3] = launch("a", 3, 1.0, digest="other")
    verdict = judge(found, check_equivalence(found))
    assert verdict.kind == "invalid"
    assert verdict.sentence == "INVALID: the contenders did not train the same model: a ended with different parameters"
    torn = launch("a", 0, 1.0)
    torn = replace(torn, ranks=[torn.ranks[0], replace(torn.ranks[1], digest="x")])
    found = check_equivalence({"a": [torn], "b": launches("b", [1.0, 1.0])})
    assert found.mismatches == {"a": "ended with different parameters on different ranks"}


NAN, INF = math.nan, math.inf
GPU: dict[str, Any] = {"device": "H200"}
LOST = GPU | {"losses": [NAN] * 7, "sample": [NAN, INF, 2.0]}
STILL = GPU | {"start": [1.0, 2.0, 2.0 - 1e-7]}


@pytest.mark.parametrize(
    ("of_a", "of_b", "mismatch"),
    [
        # Two CPU ranks: bit-identical.
        ({}, {"losses": [2.5, 2.25, 2.0, 1.75, 1.5, 1.2500001, 1.0]}, "had a different loss at step 1 (2.5, others 3)"),
        ({}, {"losses": [2.5, 2.25]}, "took 2 steps, others 7"),
        ({}, {"losses": [None] * 7}, "had a different loss at step 1 (none, others 3)"),
        ({}, {"digest": "e"}, "ended with different parameters"),
        ({"losses": [NAN] * 7}, {"losses": [NAN] * 7}, ""),
        ({"losses": [NAN] * 7}, {"losses": [None] * 7}, "had a different loss at step 1 (none, others nan)"),
        # On GPUs within 0.4 of what training moved, which is 1 here, unless that is no more than rounding.
        (GPU, GPU | {"digest": "e", "sample": [1.3, 2.0, 2.0]}, ""),
        (GPU, GPU | {"digest": "e", "sample": [1.0, 2.0, 1.5]},
         "ended with parameters 5.0e-01 from those of others, which training moved by 1.0e+00"),
        (STILL, STILL | {"digest": "e", "sample": [1.0, 2.0, 2.0 - 1e-7]}, ""),
        (GPU | {"losses": [NAN] * 7}, GPU, "had a different loss at step 1 (3, others nan)"),
        (LOST, LOST | {"digest": "e"}, ""),
        (LOST, GPU, "had a different loss at step 1 (3, others nan)"),
    ],
)  # fmt: skip
def test_training_must_be_bit_identical_on_two_cpu_ranks_and_within_a_tolerance_on_gpus(
    of_a: dict[str, Any], of_b: dict[str, Any], mismatch: str
) -> None:
    found = check_equivalence(
        {"a": [launch("a", n, 1.0, **of_a) for n in range(3)], "b": [launch("b", 0, 1.0, **of_b)]}
    )
    assert found.is_valid is not bool(mismatch)
    assert found.mismatches == ({"b": mismatch} if mismatch else {})
    if of_b.get("digest") == "e" and not mismatch:
        assert ("parameters not comparable" if of_a == STILL else "parameters within 0.4") in str(found)


# Of four ranks, each with its part of a batch of 32: gradients added up in their order ("seq") or in pairs, with a
# learning rate of 0.9 or 0.99 of what it should be, and not reduced any more from step 10 on ("alone10").
LOSSES = json.loads(Path(__file__).with_name("recorded_losses.json").read_text())


def on_four(model: str, name: str, **changes: object) -> list[Launch]:
    return [launch(name, 0, 1.0, ranks=4, losses=LOSSES[model][name], digest=name, **changes)]


@pytest.mark.parametrize("model", LOSSES)
def test_four_ranks_that_add_up_in_another_order_train_the_same_model(model: str) -> None:
    found = check_equivalence({name: on_four(model, name) for name in ("seq", "pair")})
    assert found.is_valid, found
    assert ("rounding has grown too far" in str(found)) is (model == "resnet18")


@pytest.mark.parametrize(
    ("model", "name", "step"),
    [(model, name, 2) for model in LOSSES for name in ("lr0.9", "lr0.99")]
    + [("mlp", "alone10", 12), ("resnet18", "alone10", 12)],
)
def test_four_ranks_that_train_another_model_are_found_out_at_once(model: str, name: str, step: int) -> None:
    found = check_equivalence({each: on_four(model, each) for each in ("seq", name)})
    assert f"{name} had a different loss at step {step} " in str(found)


def test_scripts_have_a_tolerance_of_a_thousandth_and_infinite_losses_no_mean() -> None:
    """Launches of a script have no batch size."""
    scripts = {name: on_four("resnet18", name, batch=None) for name in ("seq", "lr0.99")}
    assert check_equivalence(scripts).is_valid
    far = [launch("b", 0, 1.0, device="H200", losses=[3.004, 2.5, 2.0, 1.75, 1.5, 1.25, 1.0])]
    assert "step 1" in str(check_equivalence({"a": launches("a", [1.0] * 2), "b": far}))
    ranks = [launch("a", 0, 1.0, losses=[loss, 1.0]).first for loss in (math.inf, -math.inf)]
    lost, one = replace(launch("a", 0, 1.0), ranks=ranks).losses
    assert math.isnan(lost)
    assert one == 1.0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_a_contender_that_steps_too_little_is_detected_even_if_training_moves_little(share: float) -> None:
    start, moved = [1.0, 2.0, 2.0], 1e-4  # small against the parameters

    def ending(name: str, share: float) -> Launch:
        return launch(name, 0, 1.0, device="H200", digest=name, start=start, sample=[1.0, 2.0, 2.0 + share * moved])

    assert check_equivalence({"a": [ending("a", 1.0)], "b": [ending("b", 1.1)]}).is_valid
    assert list(check_equivalence({"a": [ending("a", 1.0)], "b": [ending("b", share)]}).mismatches) == ["b"]


# Real launches on two cores: one contender, the same again, and slowed by 5%, as --self-check 5 runs them.
RECORDED = json.loads(Path(__file__).with_name("recorded_self_check.json").read_text())


def recorded(name: str, rounds: int) -> list[Launch]:
    ends = [[0.0, *accumulate((us / 1e6 for us in steps), initial=0.0)] for steps in RECORDED["steps_us"][name]]
    return [launch(name, number, 1.0, ends=each) for number, each in enumerate(ends[:rounds])]


@pytest.mark.parametrize("rounds", [6, 9, 12])
def test_recorded_launches_show_5_percent_and_no_difference_for_a_copy(rounds: int) -> None:
    own, again, slowed = (recorded(name, rounds) for name in ("own", "again", "slowed"))
    assert own[0].steps == pytest.approx([us / 1e6 for us in RECORDED["steps_us"]["own"][0]])
    assert judge({"own": own, "again": again}, check_equivalence({"own": own})).kind == "no difference"
    found = judge({"own": own, "slowed": slowed}, check_equivalence({"own": own}))
    assert (found.kind, found.winner) == ("faster", "own")
    assert found.ratio.low < 1.05 < found.ratio.high


CONFIG = RunConfig("native", "shm", "torchrun")
CONTENDERS = [Contender(DUALDIST, replace(CONFIG, launcher=name)) for name in ("torchrun", "mpirun", "srun")]


CHECKS = ordered_checks(CONTENDERS, 3, uses_gpus=False)
LABELS = [each.label for each in CONTENDERS]
OF_DDP = Contender("ddp", replace(CONFIG, transport="gloo"))
BASELINE = "a baseline adds in the order of its library"


def on_three(contender: Contender, **changes: object) -> Launch:
    return launch(contender.key, 0, 1.0, ranks=3, label=contender.label, **changes)


def check_failed(contender: Contender) -> Launch:
    error = "dualdist.errors.UsageError: reduction='ordered' with compression"
    return failed_launch(contender.key, 0, f"exit code 1\n{error}")


def test_two_ranks_gpus_and_a_single_candidate_have_no_ordered_launches() -> None:
    assert [each.key for each in CHECKS] == [f"{each.key}-ordered" for each in CONTENDERS]
    assert not any(each.is_candidate or each.label in LABELS for each in CHECKS)
    assert ordered_checks([*CONTENDERS, OF_DDP], 3, uses_gpus=False) == CHECKS
    assert ordered_checks(CONTENDERS, 2, uses_gpus=False) == []
    assert ordered_checks(CONTENDERS, 3, uses_gpus=True) == []
    assert ordered_checks([CONTENDERS[0], OF_DDP, Contender(DUALDIST, CONFIG, copy=1)], 3, uses_gpus=False) == []


def with_ordered(*checks: Launch, digests: str = "abcd", ended: str = "complete") -> ComparisonResult:
    """Result of three ranks whose parameters differ by rounding, and of these launches with ordered sums."""
    training = [on_three(each, digest=digest) for each, digest in zip([*CONTENDERS, OF_DDP], digests, strict=True)]
    return summarize([*CONTENDERS, OF_DDP, *CHECKS], [], [*training, *checks], ended)


@pytest.mark.parametrize(
    ("of_checks", "same", "wrong"), [("oop", LABELS[:2], LABELS[2]), ("poo", LABELS[1:], LABELS[0])]
)
def test_other_bits_with_ordered_sums_are_a_fault_even_where_training_agrees_up_to_rounding(
    of_checks: str, same: list[str], wrong: str
) -> None:
    checks = [on_three(each, digest=digest) for each, digest in zip(CHECKS, of_checks, strict=True)]
    found = with_ordered(*checks, digests="aaaa")
    assert found.equivalence.same_bits == same
    assert found.equivalence.mismatches == {
        wrong: f"ended with other bits than {same[0]} with ordered sums, which is a fault"
    }
    assert found.verdict.kind == "invalid"
    assert f"{wrong} ended with other bits than {same[0]}" in found.verdict.sentence


def test_a_rank_with_other_bits_than_the_others_with_ordered_sums_is_a_fault() -> None:
    torn = on_three(CHECKS[1], digest="o")
    torn.ranks[2] = replace(torn.ranks[2], digest="p")
    found = with_ordered(on_three(CHECKS[0], digest="o"), torn, check_failed(CHECKS[2])).equivalence
    assert list(found.mismatches) == [LABELS[1]]
    assert found.same_bits == []


def test_a_contender_without_ordered_sums_is_not_checked_which_is_no_fault() -> None:
    asking = on_three(CHECKS[0], digest="p", reduction="unordered")
    same = [on_three(each, digest="o") for each in CHECKS[1:]]
    found = with_ordered(asking, *same)
    assert found.equivalence.same_bits == LABELS[1:]
    assert found.equivalence.unchecked[LABELS[0]] == "the program asks for unordered sums itself"
    found = with_ordered(check_failed(CHECKS[0]), *same)
    assert found.equivalence.unchecked[LABELS[0]] == "dualdist.errors.UsageError: reduction='ordered' with compression"
    assert (found.equivalence.is_valid, found.refused) == (True, [])
    found = with_ordered(same[0], ended="interrupted")
    assert (found.equivalence.is_valid, found.equivalence.same_bits) == (True, ())
    assert found.equivalence.unchecked == {
        **dict.fromkeys((LABELS[0], LABELS[2]), "it was not launched: interrupted"),
        OF_DDP.label: BASELINE,
        LABELS[1]: "there is no other to compare it with",
    }
    assert "gave the same bits" not in found.verdict.sentence


def test_metrics_follow_from_the_records_of_ranks() -> None:
    contender, none = Contender(DUALDIST, CONFIG), Contender("none", CONFIG)
    one = Contender("one", RunConfig("auto", None, "python"))
    steps_s = {contender: 0.2, none: 0.15, one: 0.1}
    found = [launch(each.key, number, step_s) for each, step_s in steps_s.items() for number in range(6)]
    figures = {each.method: each for each in summarize([contender, one, none], [], found, "complete").contenders}
    ours = figures[DUALDIST]
    assert ours.step_s.value == pytest.approx(0.2)  # the slowest rank's
    assert ours.samples_per_s.value == pytest.approx(16 / 0.2)
    assert ours.samples_per_s_by_rank == pytest.approx([8 / 0.2, 8 / 0.1])
    assert ours.scaling_efficiency.value == pytest.approx(0.5)
    assert ours.exposed_s.value == pytest.approx(0.05)
    assert (ours.startup_s, ours.init_s) == (4.0, 2.0)
    assert (ours.peak_bytes, ours.tcp_bytes, ours.cpu_s) == (100 << 20, 1000.0, 1.0)
    scripts = [replace(each, batch=None) for each in found]
    result = summarize([contender, one], [], scripts, "complete")
    assert {each.scaling_efficiency for each in result.contenders} == {None}


def test_a_launch_without_allreduce_timings_counts_without_bandwidth() -> None:
    contender = Contender(DUALDIST, CONFIG)
    timed = {"sizes": [{"bytes": 8, "seconds": {"dualdist_": [2.0], "raw_": [1.0]}}]}
    swept = launch(contender.key, 0, 1.0, allreduce=timed)
    not_swept = launch(contender.key, 1, 1.0, allreduce={"unmeasured": "raw mpi4py is measured on CPU tensors only"})
    (found,) = summarize([contender], [], [not_swept, swept], "complete").contenders
    assert (found.launches, [point.seconds.value for point in found.bandwidth]) == (2, [2.0])
    (found,) = summarize([contender], [], [not_swept], "complete").contenders
    assert (found.launches, found.bandwidth, found.latency_s) == (1, [], None)


def test_foreign_load_under_srun_is_the_maximum_over_nodes_of_the_ranks_readings() -> None:
    def ranks(*nodes: int, **changes: object) -> list[RankRecord]:
        return [rank(number, 0.1, node_rank=node, **changes) for number, node in enumerate(nodes)]

    seen: dict[str, object] = {"window_s": 2.0, "machine_s": 3.0, "own_s": 1.0}
    assert foreign_cores_beside(ranks(0, 0, **seen)) == 0.5
    assert foreign_cores_beside(ranks(0, 1, **seen)) == 1.0  # of each host
    assert foreign_cores_beside(ranks(0, 0, **seen | {"window_s": 0.5})) is None
    assert foreign_cores_beside([*ranks(0, **seen), rank(1, 0.1, window_s=None, machine_s=None, own_s=None)]) is None
    assert foreign_cores_beside(ranks(0, 0, **seen | {"machine_s": None})) is None


def test_every_contender_without_launches_is_listed_with_a_reason() -> None:
    contenders = CONTENDERS
    failed = failed_launch(contenders[1].key, 1, "exit code 1\nOSError: gone")
    run = [launch(contenders[0].key, 0, 1.0), launch(contenders[1].key, 0, 1.0), failed]
    found = summarize(contenders, [], run, "the budget of 9 s is spent")
    assert [contender.launches for contender in found.contenders] == [1, 1]
    alone = failed_launch(contenders[1].key, 0, "exit code 1\nno such device")
    found_alone = summarize(contenders[:2], [], [run[0], alone], "complete")
    assert [each.reason for each in found_alone.refused] == ["exit code 1\nno such device"]
    assert found_alone.verdict.kind == "alone"
    verdict = summarize(contenders[:2], [], run[:1], "the budget of 60 s is spent").verdict
    assert verdict.kind == "too few"
    assert verdict.sentence.startswith("no verdict: only native over shm (torchrun) of 2 candidates was launched")
    assert {each.contender.config.launcher: each.reason for each in found.refused} == {
        "mpirun": "it failed in round 2 and was not launched again: OSError: gone",
        "srun": "it was never launched: the budget of 9 s is spent",
    }


def test_records_of_a_different_backend_or_without_steps_are_errors() -> None:
    contender = Contender(DUALDIST, CONFIG)
    assert record_error(contender, launch(contender.key, 0, 1.0).ranks) is None
    other = Contender(DUALDIST, RunConfig("horovod", "gloo", "torchrun"))
    error = record_error(other, launch(contender.key, 0, 1.0).ranks)
    assert error is not None
    assert error.startswith(
        "it ran on native over shm, not on horovod over gloo: does the script name a backend itself?"
    )
    assert "it took 2 steps" in str(record_error(contender, launch(contender.key, 0, 1.0, ends=[0.0, 1.0]).ranks))


def test_the_order_of_rounds_is_random_by_seed_and_the_first_starts_with_the_candidates() -> None:
    orders = {tuple(draw_order(CONTENDERS, number, 0)) for number in range(20)}
    assert len(orders) > 3
    assert all(sorted(map(str, order)) == sorted(map(str, CONTENDERS)) for order in orders)
    assert draw_order(CONTENDERS, 3, 7) == draw_order(CONTENDERS, 3, 7)
    config = RunConfig("native", "gloo", "torchrun")
    contenders = [*(Contender(method, config) for method in ("ddp", "none", "one")), *CONTENDERS]
    for seed in range(20):
        assert {contender.method for contender in draw_order(contenders, 0, seed)[: len(CONTENDERS)]} == {DUALDIST}
    assert {draw_order(contenders, 1, seed)[0].method for seed in range(20)} > {DUALDIST}


class Clock:
    """A clock that advances by launches only, each of which takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def schedule(
        self, contenders: list[Contender], rounds: int, budget_s: float = 100.0, failing: Contender | None = None
    ) -> LaunchSchedule:
        def started(contender: Contender, number: int) -> Launch:
            self.now += self.seconds
            if contender == failing:
                return failed_launch(contender.key, number, "no")
            step_s = STEP_S.get(f"{contender.config.backend}-{contender.config.transport}", 0.1)
            return launch(contender.key, number, step_s, seconds=self.seconds, label=contender.label)

        return LaunchSchedule(contenders, started, rounds=rounds, budget_s=budget_s, clock=lambda: self.now)


def test_no_round_but_the_first_starts_that_would_exceed_the_budget() -> None:
    clock = Clock(5.0)
    rounds = clock.schedule(CONTENDERS, 9)
    assert rounds.remaining_s() == 100.0  # all would take longer
    assert len(list(rounds)) == 18  # six rounds of 15 s
    assert (clock.now, rounds.ended) == (90.0, "the budget of 100 s is spent; a round takes about 15 s")
    assert rounds.left_out == []
    rounds = Clock(60.0).schedule(CONTENDERS, 9)
    assert len(list(rounds)) == 2
    assert "is spent; a round takes about 120 s, more than the budget" in rounds.ended


# The first of a backend is not its fastest.
MIXED = [
    *(Contender(DUALDIST, RunConfig("native", name, "torchrun")) for name in ("shm", "gloo")),
    *(Contender(DUALDIST, RunConfig("horovod", name, "mpirun")) for name in ("gloo", "mpi")),
    Contender(DUALDIST, RunConfig("mpi", "mpi", "mpirun")),
    *(Contender(method, RunConfig("native", "gloo", "torchrun")) for method in ("ddp", "one")),
]
STEP_S = {"native-gloo": 0.1, "native-shm": 0.2, "horovod-mpi": 0.3, "horovod-gloo": 0.4, "mpi-mpi": 0.5}


@pytest.mark.parametrize(
    ("budget_s", "launches_of_each"),
    [
        # All seven six times take 42 s, the five candidates 30 s.
        (42.0, [6, 6, 6, 6, 6, 6, 6]),
        (41.0, [6, 6, 6, 6, 6, 6, 0]),
        (35.0, [6, 6, 6, 6, 6, 0, 0]),
        # Further transports of a backend; then all but the first two.
        (29.0, [6, 6, 6, 0, 6, 0, 0]),
        (18.0, [6, 0, 6, 0, 6, 0, 0]),
        (13.0, [6, 0, 6, 0, 0, 0, 0]),
    ],
)
def test_a_budget_too_small_for_all_measures_the_first_of_each_backend_in_full(
    budget_s: float, launches_of_each: list[int]
) -> None:
    clock = Clock(1.0)
    schedule = clock.schedule(MIXED, 6, budget_s)
    done = list(schedule)
    assert [sum(each.contender == contender.key for each in done) for contender in MIXED] == launches_of_each
    assert clock.now <= budget_s
    assert schedule.enough == "--budget 1m"
    result = summarize(MIXED, [], done, schedule.ended, left_out=schedule.left_out, enough=schedule.enough)
    assert result.verdict.kind == "faster"
    too_small = "as the budget is too small for a verdict on all; about --budget 1m is enough"
    assert {each.contender: each.reason for each in result.refused} == {
        contender: f"left out{' after 1 launch' * count}, {too_small}"
        for contender, count in zip(MIXED, launches_of_each, strict=True)
        if count < 6
    }


def test_a_contender_that_failed_is_not_launched_again() -> None:
    assert len(list(Clock(1.0).schedule(CONTENDERS, 3, failing=CONTENDERS[1]))) == 7


def test_ordered_launches_follow_the_rounds_once_and_the_budget_leaves_time_for_them() -> None:
    clock, names, both = Clock(6.0), [each.key for each in CHECKS], [*CONTENDERS, *CHECKS]
    rounds = clock.schedule(both, 9, 143.0)
    assert len(rounds.remaining) == 30
    done = list(rounds)
    assert [each.contender for each in done[-3:]] == names
    assert {each.round for each in done[-3:]} == {5}
    assert (clock.now, len(done)) == (126.0, 21)  # six rounds of 18 s, and the checks
    assert rounds.ended == "the budget of 143 s is spent; a round takes about 18 s"
    assert (rounds.left_out, rounds.enough) == ([], "--budget 3m")
    tight = Clock(6.0)
    rounds = tight.schedule(both, 9, 120.0)  # six rounds would fit without the checks
    launched = [each.contender for each in rounds]
    (left,) = rounds.left_out
    assert launched[-2:] == [name for name in names if name != f"{left.key}-ordered"]
    assert tight.now <= 120.0
    rounds = Clock(60.0).schedule(both, 9)
    assert [each.contender in names for each in rounds] == [False, False]
    assert "before" not in rounds.ended

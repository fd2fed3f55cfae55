"""The verdict of a comparison: who is faster, with which confidence, and when it must not say so."""

from __future__ import annotations

import json
import math
import random
from itertools import accumulate
from pathlib import Path

import pytest
from comparisons import launch, launches, rank
from scipy import stats

from dualdist.bench.compare.equivalence import sameness
from dualdist.bench.compare.figures import result
from dualdist.bench.compare.launches import Launch, RankRecord, by_cell, foreign_of
from dualdist.bench.compare.matrix import DUALDIST, Cell
from dualdist.bench.compare.runner import unfit
from dualdist.bench.compare.schedule import LaunchSchedule, ScheduleLimits, order_of
from dualdist.bench.compare.verdict import Verdict, against, ranking, verdict
from dualdist.bench.jobs import RunConfig
from dualdist.bench.paired import LEAST_LAUNCHES, centre, ratio_of, student

TRIALS = 200


def judged(**steps_s: list[float]) -> Verdict:
    found = {name: launches(name, values) for name, values in steps_s.items()}
    return verdict(found, sameness(found))


def drawn(seed: int, runs: int, factor: float = 1.0, *, upset: float = 0.0) -> list[float]:
    """Median steps of launches that differ by 2% for themselves; some are slowed much more by somebody else."""
    draw = random.Random(seed)
    return [0.1 * factor * draw.gauss(1, 0.02) * (1.3 if draw.random() < upset else 1) for _ in range(runs)]


@pytest.mark.parametrize(("runs", "upset"), [(6, 0.0), (7, 0.0), (9, 0.0), (9, 0.15), (15, 0.0)])
def test_the_same_contender_twice_makes_no_difference_in_95_of_100_comparisons(runs: int, upset: float) -> None:
    found = [
        judged(a=drawn(2 * seed, runs, upset=upset), b=drawn(2 * seed + 1, runs, upset=upset)) for seed in range(TRIALS)
    ]
    wrong = sum(each.kind == "faster" for each in found)
    assert all(each.kind in ("faster", "no difference") for each in found)
    # 5% of 200 is 10; with 15 or more of them a test of 5% would be found out in 92 of 100 cases.
    assert wrong <= 14


@pytest.mark.parametrize(("runs", "found_in"), [(9, 0.9), (15, 0.97)])
def test_a_contender_that_is_5_percent_slower_is_found(runs: int, found_in: float) -> None:
    found = [judged(a=drawn(2 * seed, runs), b=drawn(2 * seed + 1, runs, 1.05)) for seed in range(TRIALS)]
    assert sum((each.kind, each.winner) == ("faster", "a") for each in found) >= found_in * TRIALS


def test_the_best_of_five_that_are_the_same_does_not_win() -> None:
    found = [judged(**{name: drawn(5 * seed + i, 9) for i, name in enumerate("abcde")}) for seed in range(TRIALS)]
    assert sum(each.kind == "faster" for each in found) <= 14


def test_weather_that_a_round_has_in_common_is_taken_out() -> None:
    weather = [1.0, 1.9, 1.2, 1.6, 1.0, 2.0, 1.3, 1.8, 1.1]
    slow, fast = drawn(1, 9, 1.05), drawn(2, 9)
    found = judged(
        slow=[a * b for a, b in zip(slow, weather, strict=True)],
        fast=[a * b for a, b in zip(fast, weather, strict=True)],
    )
    assert (found.kind, found.winner) == ("faster", "fast")


def test_the_sentence_has_ratio_interval_and_number_of_runs() -> None:
    found = judged(a=[1.31, 1.29, 1.30, 1.31, 1.36, 1.27, 1.33, 1.31, 1.31], b=[1.0] * 9)
    assert found.sentence == "b is 1.31x faster than a (95% interval 1.29 to 1.33, 9 runs each)"
    same = judged(a=[1.0, 1.01, 0.99] * 3, b=[1.0, 0.99, 1.01] * 3)
    assert same.sentence.startswith("no difference that 9 runs can show between ")
    alone = judged(a=[1.0] * 9)
    assert alone.sentence == "a is the only contender that ran here"
    assert judged().kind == "nothing"


def test_fewer_than_six_runs_tell_nothing_however_far_apart() -> None:
    few = judged(a=[1.0] * 5, b=[9.0] * 5)
    assert few.kind == "too few"
    assert "5 runs are too few" in few.sentence
    assert judged(a=[1.0] * 6, b=[9.0] * 6).kind == "faster"
    assert 1 - 2 / 2**LEAST_LAUNCHES > 0.95 > 1 - 2 / 2 ** (LEAST_LAUNCHES - 1)


def test_only_rounds_in_which_both_ran_count() -> None:
    one = launches("a", [1.0] * 8)
    other = [launch("b", number, 2.0) for number in range(2, 9)]
    found = verdict({"a": one, "b": other}, sameness({"a": one}))
    assert found.ratio is not None
    assert (found.ratio.launches, found.ratio.value) == (6, 2.0)


def test_another_model_makes_the_comparison_invalid_however_fast() -> None:
    found = {"a": launches("a", [1.0] * 9), "b": launches("b", [9.0] * 9), "c": launches("c", [9.0] * 9)}
    found["a"][3] = launch("a", 3, 1.0, digest="other")
    said = verdict(found, sameness(found))
    assert said.kind == "invalid"
    assert said.sentence == "INVALID: the contenders did not train the same model: a ended with other parameters"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"losses": [2.5, 2.25, 2.0, 1.75, 1.5, 1.2500001, 1.0]}, "had another loss at step 1 (2.5, others 3)"),
        ({"losses": [2.5, 2.25]}, "took 2 steps, others 7"),
        ({"losses": [None] * 7}, "had another loss at step 1 (none, others 3)"),
        ({"digest": "e"}, "ended with other parameters"),
    ],
)
def test_sameness_on_two_cpu_ranks_is_to_the_bit(changes: dict[str, object], told: str) -> None:
    found = {"a": launches("a", [1.0] * 3), "b": [launch("b", 0, 1.0, **changes)]}
    same = sameness(found)
    assert not same.is_valid
    assert same.differing == {"b": told}


def test_ranks_of_one_launch_that_end_apart_are_no_training() -> None:
    torn = launch("a", 0, 1.0)
    torn = torn.model_copy(update={"ranks": [torn.ranks[0], torn.ranks[1].model_copy(update={"digest": "x"})]})
    found = sameness({"a": [torn], "b": launches("b", [1.0, 1.0])})
    assert found.differing == {"a": "ended with different parameters on different ranks"}


def test_sameness_elsewhere_is_within_a_tolerance_that_it_tells() -> None:
    def on_gpu(cell: str, **changes: object) -> Launch:
        return launch(cell, 0, 1.0, device="H200", **changes)

    near = on_gpu("b", digest="e", sample=[1.3, 2.0, 2.0])  # training moved the last one by 1
    assert sameness({"a": [on_gpu("a")], "b": [near]}).is_valid
    assert "parameters within 0.4" in str(sameness({"a": [on_gpu("a")], "b": [near]}))
    far = sameness({"a": [on_gpu("a")], "b": [on_gpu("b", digest="e", sample=[1.0, 2.0, 1.5])]})
    assert far.differing["b"] == "ended with parameters 5.0e-01 from those of others, which training moved by 1.0e+00"
    nan = [float("nan")] * 7
    assert sameness({"a": [on_gpu("a", losses=nan)], "b": [on_gpu("b", losses=nan)]}).is_valid
    assert not sameness({"a": [on_gpu("a", losses=nan)], "b": [on_gpu("b")]}).is_valid


# Of four ranks, each with its part of a batch of 32: gradients added up in their order ("seq") or in pairs, with a
# learning rate of 0.9 or 0.99 of what it should be, and not reduced any more from step 10 on ("alone10").
LOSSES = json.loads(Path(__file__).with_name("recorded_losses.json").read_text())


def on_four(cell: str, losses: list[float], **changes: object) -> Launch:
    two = launch(cell, 0, 1.0, losses=losses, digest=cell, **changes)
    return two.model_copy(update={"ranks": two.ranks * 2})


@pytest.mark.parametrize("model", LOSSES)
def test_four_ranks_that_add_up_in_another_order_train_the_same_model(model: str) -> None:
    found = sameness({name: [on_four(name, LOSSES[model][name])] for name in ("seq", "pair")})
    assert found.is_valid, found
    assert ("rounding has grown too far" in str(found)) is (model == "resnet18")


@pytest.mark.parametrize(
    ("model", "name", "step"),
    [(model, name, 2) for model in LOSSES for name in ("lr0.9", "lr0.99")]
    + [("mlp", "alone10", 12), ("resnet18", "alone10", 12)],
)
def test_four_ranks_that_train_another_model_are_found_out_at_once(model: str, name: str, step: int) -> None:
    found = sameness({each: [on_four(each, LOSSES[model][each])] for each in ("seq", name)})
    assert f"{name} had another loss at step {step} " in str(found)


def test_programs_that_round_in_their_own_way_are_given_a_thousandth() -> None:
    """A script's launches do not say what a batch is."""
    found = {name: on_four(name, LOSSES["resnet18"][name]) for name in ("seq", "lr0.99", "lr0.9")}
    scripts = {name: [each.model_copy(update={"batch": None})] for name, each in found.items()}
    assert sameness({name: scripts[name] for name in ("seq", "lr0.99")}).is_valid
    far = [launch("b", 0, 1.0, device="H200", losses=[3.004, 2.5, 2.0, 1.75, 1.5, 1.25, 1.0])]
    assert "step 1" in str(sameness({"a": launches("a", [1.0] * 2), "b": far}))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_a_contender_that_steps_too_little_is_found_however_little_training_moves(share: float) -> None:
    start, moved = (
        [1.0, 2.0, 2.0],
        1e-4,
    )  # of the parameters' size, a tenth of what was allowed when size was the measure

    def ending(cell: str, share: float) -> Launch:
        return launch(cell, 0, 1.0, device="H200", digest=cell, start=start, sample=[1.0, 2.0, 2.0 + share * moved])

    assert sameness({"a": [ending("a", 1.0)], "b": [ending("b", 1.1)]}).is_valid
    assert list(sameness({"a": [ending("a", 1.0)], "b": [ending("b", share)]}).differing) == ["b"]


def test_where_training_moves_no_more_than_rounding_nothing_is_told_of_the_parameters() -> None:
    still = launch("a", 0, 1.0, device="H200", start=[1.0, 2.0, 2.0 - 1e-7])
    found = sameness(
        {"a": [still], "b": [launch("b", 0, 1.0, device="H200", digest="e", sample=[1.0, 2.0, 2.0 - 1e-7])]}
    )
    assert found.is_valid
    assert "of the parameters it cannot be told" in str(found)


def test_infinities_that_differ_between_ranks_have_no_mean() -> None:
    ranks = [launch("a", 0, 1.0, losses=[loss, 1.0]).first for loss in (math.inf, -math.inf)]
    lost, one = launch("a", 0, 1.0).model_copy(update={"ranks": ranks}).losses
    assert lost is not None
    assert math.isnan(lost)
    assert one == 1.0


def test_nan_in_every_launch_of_two_ranks_is_the_same_training() -> None:
    lost = [launch("a", number, 1.0, losses=[math.nan] * 7) for number in range(3)]
    assert sameness({"a": lost, "b": [launch("b", 0, 1.0, losses=[math.nan] * 7)]}).is_valid
    found = sameness({"a": lost, "b": [launch("b", 0, 1.0, losses=[None] * 7)]})
    assert found.differing == {"b": "had another loss at step 1 (none, others nan)"}


def test_parameters_that_all_lost_to_infinity_agree() -> None:
    lost = {"device": "H200", "losses": [float("nan")] * 7, "sample": [float("nan"), float("inf"), 2.0]}
    found = sameness({"a": [launch("a", 0, 1.0, **lost)], "b": [launch("b", 0, 1.0, **lost, digest="e")]})
    assert found.is_valid
    assert (
        "b" in sameness({"a": [launch("a", 0, 1.0, **lost)] * 2, "b": [launch("b", 0, 1.0, device="H200")]}).differing
    )


@pytest.mark.parametrize("degrees", [5, 6, 8, 14, 50])
def test_students_quantile_is_scipys(degrees: int) -> None:
    assert student(0.975, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3)


def test_an_interval_of_few_launches_is_the_range_and_says_that_it_is_not_sound() -> None:
    found = centre([3.0, 1.0, 2.0])
    assert (found.value, found.low, found.high, found.is_sound) == (2.0, 1.0, 3.0, False)
    assert not found.differs_from(0.0)
    sound = ratio_of([2.0, 2.1, 1.9, 2.0, 2.05, 1.95], [1.0] * 6)
    assert sound.is_sound
    assert sound.differs_from(1.0)


def test_ranking_is_by_rounds_and_the_others_are_held_against_the_winner() -> None:
    found = {"a": launches("a", [1.0, 5.0] * 3), "b": launches("b", [0.9, 4.5] * 3), "c": launches("c", [2.0] * 6)}
    assert ranking(found)[0] == "b"
    said = against("b", found)
    assert said["a"].startswith("b is 1.11x faster than a (95% interval 1.11 to 1.11, 6 runs each)")


# Real launches on two cores: one contender, the same again, and slowed by 5%, as --self-check 5 runs them.
RECORDED = json.loads(Path(__file__).with_name("recorded_self_check.json").read_text())


def recorded(name: str, rounds: int) -> list[Launch]:
    found = []
    for number, steps_us in enumerate(RECORDED["steps_us"][name][:rounds]):
        ends = [0.0, 0.0, *(us / 1e6 for us in accumulate(steps_us))]
        found.append(launch(name, number, 1.0, ends=ends))
    return found


@pytest.mark.parametrize("rounds", [6, 9, 12])
def test_of_real_launches_the_same_again_makes_no_difference_and_5_percent_do(rounds: int) -> None:
    own, again, slowed = (recorded(name, rounds) for name in ("own", "again", "slowed"))
    assert own[0].steps == pytest.approx([us / 1e6 for us in RECORDED["steps_us"]["own"][0]])
    same = sameness({"own": own})
    assert verdict({"own": own, "again": again}, same).kind == "no difference"
    found = verdict({"own": own, "slowed": slowed}, same)
    assert (found.kind, found.winner) == ("faster", "own")
    assert found.ratio is not None
    assert found.ratio.low < 1.05 < found.ratio.high


def test_of_the_same_launches_a_bootstrap_over_steps_sees_a_difference_that_is_none() -> None:
    """Why launches are drawn and not steps: each launch moves as a whole."""
    own, again = (recorded(name, 6) for name in ("own", "again"))
    steps = [[step for each in found for step in each.steps] for found in (own, again)]
    assert ratio_of(*steps).differs_from(1.0)


PLACE = RunConfig("native", "shm", "torchrun")


def test_figures_follow_from_what_ranks_recorded() -> None:
    cell, one, none = Cell(DUALDIST, PLACE), Cell("one", RunConfig("auto", None, "python")), Cell("none", PLACE)
    found = [launch(cell.key, number, 0.2) for number in range(6)]
    found += [launch(none.key, number, 0.15) for number in range(6)]
    found += [launch(one.key, number, 0.1) for number in range(6)]
    figures = {each.kind: each for each in result([cell, one, none], [], found, "complete").cells}
    ours = figures[DUALDIST]
    assert ours.step_s.value == pytest.approx(0.2)  # the slowest rank's
    assert ours.rate is not None
    assert ours.rate.value == pytest.approx(16 / 0.2)
    assert ours.rate_of_ranks == pytest.approx([8 / 0.2, 8 / 0.1])
    assert ours.efficiency is not None
    assert ours.efficiency.value == pytest.approx(0.5)
    assert ours.exposed_s is not None
    assert ours.exposed_s.value == pytest.approx(0.05)
    assert (ours.startup_s, ours.init_s) == (4.0, 2.0)
    assert (ours.peak_bytes, ours.tcp_bytes, ours.cpu_s) == (100 << 20, 1000.0, 1.0)


def test_of_a_script_no_efficiency_is_told_as_nobody_knows_what_one_rank_has_to_do_alone() -> None:
    cell, one = Cell(DUALDIST, PLACE), Cell("one", RunConfig("auto", None, "python"))
    found = [launch(each.key, 0, 0.1).model_copy(update={"batch": None}) for each in (cell, one)]
    assert [each.efficiency for each in result([cell, one], [], found, "complete").cells] == [None, None]


def test_a_launch_whose_allreduces_could_not_be_timed_counts_and_has_no_curve() -> None:
    cell = Cell(DUALDIST, PLACE)
    timed = {"sizes": [{"bytes": 8, "seconds": {"dualdist_": [2.0], "raw_": [1.0]}}]}
    swept, not_swept = (
        launch(cell.key, number, 1.0).model_copy(update={"allreduce": allreduce})
        for number, allreduce in enumerate([timed, {"unmeasured": "raw mpi4py is measured on CPU tensors only"}])
    )
    (found,) = result([cell], [], [not_swept, swept], "complete").cells
    assert (found.runs, [point.seconds for point in found.curve]) == (2, [2.0])
    (found,) = result([cell], [], [not_swept], "complete").cells
    assert (found.runs, found.curve, found.latency_s) == (1, [], None)


def test_foreign_load_under_srun_is_what_the_ranks_saw_host_by_host() -> None:
    def ranks(*nodes: int, **changes: object) -> list[RankRecord]:
        return [rank(number, 0.1, node_rank=node, **changes) for number, node in enumerate(nodes)]

    seen: dict[str, object] = {"window_s": 2.0, "machine_s": 3.0, "own_s": 1.0}
    assert foreign_of(ranks(0, 0, **seen)) == 0.5
    assert foreign_of(ranks(0, 1, **seen)) == 1.0  # of each host
    assert foreign_of(ranks(0, 0, **seen | {"window_s": 0.5})) is None
    assert foreign_of([*ranks(0, **seen), rank(1, 0.1, window_s=None, machine_s=None, own_s=None)]) is None
    assert foreign_of(ranks(0, 0, **seen | {"machine_s": None})) is None


def test_a_contender_that_failed_is_listed_with_its_reason() -> None:
    cell, other = Cell(DUALDIST, PLACE), Cell(DUALDIST, RunConfig("horovod", "gloo", "torchrun"))
    failed = Launch(cell=other.key, round=0, began=0, seconds=1, command="c", error="exit code 1\nno such device")
    found = result([cell, other], [], [launch(cell.key, 0, 1.0), failed], "complete")
    assert [(each.cell, each.reason) for each in found.refused] == [(other, "exit code 1\nno such device")]
    assert found.verdict.kind == "alone"


def test_who_alone_was_launched_of_several_has_not_won() -> None:
    cells = [Cell(DUALDIST, RunConfig("native", "shm", name)) for name in ("torchrun", "mpirun")]
    said = result(cells, [], [launch(cells[0].key, 0, 1.0)], "the budget of 60 s was used up").verdict
    assert said.kind == "too few"
    assert said.sentence.startswith("no verdict: of 2 contenders native over shm (torchrun) alone was launched")


def test_no_cell_is_dropped_without_a_reason() -> None:
    cells = [Cell(DUALDIST, RunConfig("native", "shm", name)) for name in ("torchrun", "mpirun", "srun")]
    failed = Launch(cell=cells[1].key, round=1, began=0, seconds=1, command="c", error="exit code 1\nOSError: gone")
    run = [launch(cells[0].key, 0, 1.0), launch(cells[1].key, 0, 1.0), failed]
    found = result(cells, [], run, "the budget of 9 s was used up")
    assert [cell.runs for cell in found.cells] == [1, 1]
    assert {each.cell.config.launcher: each.reason for each in found.refused} == {
        "mpirun": "in round 2 it failed, and was not launched again: OSError: gone",
        "srun": "it was never launched: the budget of 9 s was used up",
    }


def test_records_of_another_backend_or_without_steps_are_no_cells() -> None:
    cell = Cell(DUALDIST, PLACE)
    assert unfit(cell, launch(cell.key, 0, 1.0).ranks) is None
    told = unfit(Cell(DUALDIST, RunConfig("horovod", "gloo", "torchrun")), launch(cell.key, 0, 1.0).ranks)
    assert told is not None
    assert told.startswith(
        "it ran on native over shm, not on horovod over gloo: does the script name a backend itself?"
    )
    assert "it took 2 steps" in str(unfit(cell, launch(cell.key, 0, 1.0, ends=[0.0, 1.0]).ranks))


CELLS = [Cell(DUALDIST, RunConfig("native", "shm", name)) for name in ("torchrun", "mpirun", "srun")]


def test_every_round_has_an_order_of_its_own_which_the_seed_decides() -> None:
    orders = {tuple(order_of(CELLS, number, 0)) for number in range(20)}
    assert len(orders) > 3
    assert all(sorted(map(str, order)) == sorted(map(str, CELLS)) for order in orders)
    assert order_of(CELLS, 3, 7) == order_of(CELLS, 3, 7)


def test_the_first_round_begins_with_the_contenders() -> None:
    cells = [Cell(kind, RunConfig("native", "gloo", "torchrun")) for kind in ("ddp", "none", "one")] + CELLS
    for seed in range(20):
        assert {cell.kind for cell in order_of(cells, 0, seed)[: len(CELLS)]} == {DUALDIST}
    assert {order_of(cells, 1, seed)[0].kind for seed in range(20)} > {DUALDIST}


class Clock:
    """Seconds that pass only by launching."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.log = 0.0, seconds, list[tuple[str, int]]()

    def launch(self, cell: Cell, number: int) -> Launch:
        self.now += self.seconds
        self.log.append((cell.key, number))
        return launch(cell.key, number, 0.1).model_copy(update={"seconds": self.seconds})


def test_no_round_begins_that_would_not_end_within_the_budget() -> None:
    clock = Clock(10.0)
    rounds = LaunchSchedule(CELLS, ScheduleLimits(9, 100.0), clock.launch, clock=lambda: clock.now)
    assert rounds.left_s() == 100.0  # all would take longer
    assert len(list(rounds)) == 9  # three rounds of 30 s
    assert (clock.now, rounds.ended) == (90.0, "the budget of 100 s was used up; a round takes about 30 s")


def test_a_first_round_that_takes_too_long_is_broken_off() -> None:
    clock = Clock(60.0)
    rounds = LaunchSchedule(CELLS, ScheduleLimits(9, 100.0), clock.launch, clock=lambda: clock.now)
    assert len(list(rounds)) == 2
    assert "used up in the first round; a round takes about 180 s, more than the budget" in rounds.ended


def test_every_run_that_goes_on_comes_further_though_no_round_fits_the_budget() -> None:
    done: list[Launch] = []
    for _ in range(4):
        before = len(done)
        clock = Clock(60.0)
        rounds = LaunchSchedule(
            CELLS, ScheduleLimits(2, 100.0), clock.launch, done, clock=lambda clock=clock: clock.now
        )
        done += list(rounds)
        assert len(done) > before
    assert rounds.ended == "complete"


def test_a_run_that_was_broken_off_goes_on_where_it_was() -> None:
    first, second = Clock(1.0), Clock(1.0)
    rounds = iter(LaunchSchedule(CELLS, ScheduleLimits(3, 100.0), first.launch, clock=lambda: first.now))
    done = [next(rounds) for _ in range(4)]
    again = LaunchSchedule(CELLS, ScheduleLimits(3, 100.0), second.launch, done, clock=lambda: second.now)
    assert again.left_s() == 5.0
    rest = list(again)
    assert again.ended == "complete"
    assert sorted(first.log + second.log) == sorted((cell.key, number) for cell in CELLS for number in range(3))
    assert {key: len(found) for key, found in by_cell(done + rest).items()} == {cell.key: 3 for cell in CELLS}


def test_no_round_is_gone_back_to_as_its_weather_is_gone() -> None:
    clock = Clock(1.0)
    done = [
        launch(cell.key, number, 0.1) for cell in CELLS[:2] for number in range(4) if (cell, number) != (CELLS[1], 3)
    ]
    rounds = LaunchSchedule(CELLS, ScheduleLimits(6, 100.0), clock.launch, done, clock=lambda: clock.now)
    assert len(rounds.left) == 8
    assert len(list(rounds)) == 8
    late = {number for key, number in clock.log if key == CELLS[2].key}
    assert late == {3, 4, 5}
    assert (CELLS[1].key, 3) in clock.log


def test_a_cell_that_failed_is_not_launched_again() -> None:
    clock = Clock(1.0)

    def failing(cell: Cell, number: int) -> Launch:
        found = clock.launch(cell, number)
        return found.model_copy(update={"error": "no"}) if cell == CELLS[1] else found

    assert len(list(LaunchSchedule(CELLS, ScheduleLimits(3, 100.0), failing, clock=lambda: clock.now))) == 7

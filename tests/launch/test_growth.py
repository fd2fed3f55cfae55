"""What start-up asks of the one store of a job grows with the number of ranks as the README says, and no faster."""

from __future__ import annotations

from pathlib import Path

from harness.jobs import Launch

PROGRAM = str(Path(__file__).with_name("growth_program.py"))
RANKS = 4


def test_a_rank_asks_the_store_a_few_times_for_each_other_rank(launch: Launch) -> None:
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={RANKS}", PROGRAM]
    totals = sorted(seen["total"] for seen in launch.reports(torchrun, RANKS, env={"DUALDIST_TRANSPORT": "gloo"}))
    assert all(0 < total <= 12 + 4 * RANKS for total in totals[:-1]), totals
    assert totals[-1] <= 16 + 7 * RANKS, totals  # the last to come reads what all have said

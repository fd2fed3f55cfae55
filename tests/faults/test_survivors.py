"""`dualdist run --min-ranks`: programs that are left continue in their processes when one, or a host, is lost."""

import random
import shlex
import sys
from pathlib import Path

import pytest
from faults import elastic_rank
from faults.test_going_on import assert_trained
from harness.effort import Effort
from harness.hosts import Hosts
from harness.jobs import REPORT_DIR, Launch, collect
from harness.slurm import Slurm, eventually
from launch.running import RUN

PROGRAM = elastic_rank.__file__
STEPS = elastic_rank.EPOCHS * elastic_rank.SAMPLES // elastic_rank.GLOBAL_BATCH
RUNS, LONG_RUNS, KILLS = 1, 34, 3


def drawn_kills(draw: random.Random, ranks: int) -> list[str]:
    """Return fates: kills of drawn ranks in drawn steps, of which the last often comes while the others meet."""
    fates = []
    for _ in range(KILLS - 1):
        step, delay_ms = draw.randrange(STEPS - 2), draw.uniform(0, 40)
        fates.append((draw.randrange(ranks), step, delay_ms))
    _, step, delay_ms = draw.choice(fates)
    fates.append((draw.randrange(ranks), step, delay_ms + draw.uniform(0, 2000)))
    return [f"{rank}@{step}=killed:{delay_ms:.2f}" for rank, step, delay_ms in fates]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_kills_at_any_moment_lose_and_repeat_no_sample(
    launch: Launch, tmp_path: Path, transport: str, effort: Effort
) -> None:
    """Also where a rank is killed while the others meet; all start again if one is killed before they train."""
    for seed in range(effort(RUNS, LONG_RUNS)):
        draw = random.Random(f"{transport} {seed}")
        ranks, folder = draw.choice([3, 4]), tmp_path / str(seed)
        fates, in_memory = drawn_kills(draw, ranks), draw.choice(["0", "1"])
        reports = folder / "reports"
        reports.mkdir(parents=True)
        argv = [*RUN, "-np", str(ranks), "--min-ranks", "1", "--max-restarts", "3", PROGRAM, str(folder), *fates]
        env = {"NOISY": "0", "IN_MEMORY": in_memory, "DUALDIST_TRANSPORT": transport, REPORT_DIR: str(reports)}
        outcome = launch(argv, env=env, timeout_s=240, check=False)
        shown = f"{fates}, in memory: {in_memory}\n{outcome}"
        assert outcome.rc == 0, shown
        found = collect(reports, len(list(reports.iterdir())), outcome)
        assert found, shown
        if ranks == 3:
            assert_trained(found)
        for report in found:  # the steps of four ranks are others, as four does not divide the global batch
            assert report["parameters"] == found[0]["parameters"], shown
            elastic_rank.assert_seen_once(report)
        effort.count(f"kills of ranks that the others survive, {transport}", KILLS)


def test_ranks_continue_without_a_host_that_is_cut_off_and_with_it_when_it_is_back(
    launch: Launch, two_hosts: Hosts
) -> None:
    """Only the half with `dualdist run` goes on: the programs of the other host end there."""
    folder, reports = launch.directory / "run", launch.directory / "reports"
    for each in (folder, reports):
        each.mkdir()
    env = {**two_hosts.env, REPORT_DIR: str(reports), "NOISY": "0", "CUT": "1"}
    words = ["-H", "hosta:2,hostb:1", "--min-ranks", "2", "--network-interface", "eth0"]
    named = [word for name in (REPORT_DIR, "NOISY", "PYTHONPATH") for word in ("--env", name)]
    argv = two_hosts.on(0, *RUN, *words, *named, PROGRAM, str(folder), "2@5=pauses:3600", "all@9=waits")
    with launch.start(argv, env=env) as job:
        assert eventually((folder / "paused.happened").exists, within_s=60), job.output()
        two_hosts.cut_off(1)
        try:
            assert eventually((folder / "waiting-1.happened").exists, within_s=90), job.output()
            assert eventually(lambda: not two_hosts.processes("exec", PROGRAM, two_hosts.spaces[1]), within_s=30)
        finally:
            two_hosts.connect(1)
        outcome = job.wait(120)
    assert outcome.rc == 0, str(outcome)
    found = collect(reports, 3, outcome)
    assert sorted(report["sizes"] for report in found) == [[3], [3, 2, 3], [3, 2, 3]]
    assert_trained(found)


def test_survivors_continue_in_an_allocation(slurm: Slurm, launch: Launch) -> None:
    """srun starts the programs on both nodes, and no ssh."""
    folder = launch.directory / "run"
    folder.mkdir()
    run = [*RUN, "--min-ranks", "2", PROGRAM, str(folder), "1@5=killed:2", "all@9=waits"]
    reports = launch.reports([*slurm.salloc("-N2", "-n3"), *run], 3, env={**slurm.env, "NOISY": "0"})
    assert sorted(report["sizes"] for report in reports) == [[3], [3, 2, 3], [3, 2, 3]]
    assert_trained(reports)


def test_ranks_follow_the_hosts_that_a_script_finds(launch: Launch) -> None:
    """From two ranks to three, and to one: the programs that leave exit with code 0."""
    folder = launch.directory / "run"
    folder.mkdir()
    elastic_rank.offer(folder, "2")
    script = Path(launch.write("hosts.sh", f"#!/bin/sh\ncat {shlex.quote(str(folder / 'hosts'))}\n"))
    script.chmod(0o755)
    fates = ["0@3=offers:3", "all@4=waits:more", "0@9=offers:1", "all@10=waits:fewer"]
    argv = [*RUN, "--min-ranks", "1", "--host-discovery-script", str(script), PROGRAM, str(folder), *fates]
    (report,) = launch.reports(argv, 1, env={"NOISY": "0"})
    assert report["sizes"] == [2, 3, 1]
    assert_trained([report])


def test_srun_leaves_survivors_alone_if_it_is_told_to(slurm: Slurm, launch: Launch) -> None:
    """They get one error, and may save what they have."""
    code = (
        "import os, signal, dualdist as dd, torch\n"
        "from harness.jobs import report\n"
        "dd.init(timeout_s=30)\n"
        "dd.barrier()\n"
        "if dd.rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    dd.allreduce(torch.ones(1))\n"
        "except dd.DualdistError as error:\n"
        "    report(0, {'error': str(error)})\n"
    )
    program = launch.write("survivor.py", code)
    folder = launch.directory / "reports"
    folder.mkdir()
    srun = slurm.srun("-N2", "-n2", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
    outcome = launch([*srun, sys.executable, program], env={**slurm.env, REPORT_DIR: str(folder)}, check=False)
    (report,) = collect(folder, 1, outcome)
    assert "rank 1" in report["error"], report

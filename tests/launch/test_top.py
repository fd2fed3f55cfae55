"""`dualdist top` of running jobs: slow, stopped and killed ranks, several hosts, every way of starting."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.hosts import ADDRESSES, Hosts
from harness.jobs import Job, Launch
from harness.slurm import Slurm, eventually
from launch.running import RUN, TORCHRUN, rank_env, start
from launch.top_program import SLOW_S

PROGRAM = str(Path(__file__).with_name("top_program.py"))
TOP = (sys.executable, "-m", "dualdist", "top")
STARTS = {
    "mpirun": [*RUN, "-np", "2", "--launcher", "mpirun"],
    "spawn": [*RUN, "-np", "2", "--launcher", "spawn"],
    "none": [sys.executable],
}


def look(launch: Launch, *words: str, top: Sequence[str] = TOP) -> dict[str, Any]:
    """Return the JSON of the last look."""
    found: dict[str, Any] = json.loads(launch([*top, "--once", "--json", *words]).stdout)
    return found


def find_job(launch: Launch, running: Job, top: Sequence[str] = TOP) -> dict[str, Any]:
    """Return the JSON of the job, once it has taken steps; others may run on this host."""
    running.wait_until(lambda: "has taken steps" in running.output(), within_s=120)
    found = look(launch, top=top)
    if "jobs" in found:
        (job,) = (job for job in found["jobs"] if str(launch.directory) in job["program"])
        found = look(launch, str(job["job"]), top=top)
    assert str(launch.directory) in found["program"]
    return found


@pytest.mark.smoke
def test_a_slow_rank_and_a_stopped_one_are_late(launch: Launch) -> None:
    program = launch.write("train.py", Path(PROGRAM).read_text())
    with start(launch, [*TORCHRUN, program]) as running:
        job = find_job(launch, running)
        number, (first, slow) = str(job["job"]), job["ranks"]
        assert [first["late"], slow["late"]] == [False, True], (first, slow)
        assert first["waited"] > 0.5 > slow["waited"]
        assert slow["step_s"] >= SLOW_S
        assert slow["line"].endswith("in slow") or slow["operation"]
        assert first["memory_bytes"] > 50 << 20
        stack = launch([*TOP, number, "--stack", "1"]).stdout
        assert "train.py" in stack
        assert "in main" in stack

        os.kill(slow["pid"], signal.SIGSTOP)
        first, stopped = look(launch, number)["ranks"]
        assert (first["late"], first["waited"], stopped["late"]) == (False, 1.0, True)
        assert first["operation"].startswith("reduction of gradients")
        assert f"process {slow['pid']} is stopped by a signal" in stopped["problem"]
        refused = launch([*TOP, number, "--stack", "1"], check=False)
        assert (refused.rc, refused.stderr.count("is stopped by a signal")) == (1, 1), str(refused)
        os.kill(slow["pid"], signal.SIGCONT)

        with start(launch, [*TOP, number]) as watching:
            watching.wait_until(lambda: "LATE" in watching.output())
            running.kill()
            outcome = watching.wait(30)
    assert outcome.rc == 0, str(outcome)
    assert f"job {number} has ended" in outcome.stderr
    gone = launch([*TOP, number, "--once"], check=False)
    assert (gone.rc, gone.stdout) == (1, ""), str(gone)
    assert f"no job {number} of this user" in gone.stderr


DDP = f"""import time, torch, torch.distributed as dist
dist.init_process_group("dualdist")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(10**6):
    if step == 3:
        print("has taken steps", flush=True)
    time.sleep({SLOW_S} * dist.get_rank())
    model(torch.ones(2, 4)).sum().backward()
"""


def test_a_slow_rank_of_ddp_is_late(launch: Launch) -> None:
    """DDP waits in C++, for what dualdist's progress thread does."""
    with start(launch, [*TORCHRUN, launch.write("train.py", DDP)]) as running:
        first, slow = find_job(launch, running)["ranks"]
    assert [first["late"], slow["late"]] == [False, True], (first, slow)


@pytest.mark.parametrize("name", STARTS)
def test_ranks_are_seen_however_they_were_started(launch: Launch, name: str) -> None:
    program = launch.write("train.py", Path(PROGRAM).read_text())
    with start(launch, [*STARTS[name], program]) as running:
        ranks = find_job(launch, running)["ranks"]
        assert {rank["launcher"] for rank in ranks} == {name}
        assert len(ranks) == (1 if name == "none" else 2)


def test_ranks_of_srun_are_seen(launch: Launch, slurm: Slurm) -> None:
    program = launch.write("train.py", Path(PROGRAM).read_text())
    with start(launch, [*slurm.srun("-N2", "-n2"), sys.executable, program], slurm.env) as running:
        ranks = find_job(launch, running)["ranks"]
        assert [(rank["launcher"], rank["late"]) for rank in ranks] == [("srun", False), ("srun", True)]
        assert slurm.cancel_all()  # by itself Slurm takes a while to see that srun is gone


def test_ranks_of_another_host_are_seen(launch: Launch, two_hosts: Hosts) -> None:
    program = launch.write("train.py", Path(PROGRAM).read_text())
    env = {**two_hosts.env, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29523"}
    argvs = [two_hosts.on(rank, sys.executable, program) for rank in range(2)]
    with (
        start(launch, argvs[0], {**env, **rank_env(0, 2)}) as running,
        start(launch, argvs[1], {**env, **rank_env(1, 2)}),
    ):
        for host in range(2):
            top = two_hosts.on(host, *TOP)
            number = str(find_job(launch, running, top)["job"])
            ranks = look(launch, number, top=top)["ranks"]
            assert [(rank["host"], rank["late"]) for rank in ranks] == [("hosta", False), ("hostb", True)]
            assert "in main" in launch([*top, number, "--stack", "1"]).stdout
        os.kill(ranks[0]["pid"], signal.SIGSTOP)  # which serves the store
        first, second = look(launch, number, top=top)["ranks"]
        assert first["problem"].startswith("does not answer")
        assert second["operation"].startswith("reduction of gradients")
        os.kill(ranks[0]["pid"], signal.SIGCONT)
    assert eventually(lambda: not launch([*two_hosts.on(0, *TOP), "--json"], check=False).stdout, within_s=10)

"""A job that loses a rank, or is told to stop, goes on by itself where it was, and ends as if nothing had been."""

from __future__ import annotations

import random
import signal
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from faults import elastic_rank
from faults.going_on import PROGRAM, RESTARTING, RUN, SIZE, assert_seen_once
from harness.effort import Effort
from harness.jobs import REPORT_DIR, Launch, collect
from harness.problem import flat, make_model, make_optimizer
from harness.slurm import eventually

from dualdist.utils.preemption_protocol import REQUEUE

STEPS = elastic_rank.EPOCHS * elastic_rank.SAMPLES // elastic_rank.TOGETHER
# A launcher and a backend; the latter ones in the long form.
CELLS = [("torchrun", "native"), ("horovodrun", "horovod")]
LONG = [
    *(("torchrun", "horovod"), ("horovodrun", "native"), ("spawn", "native"), ("spawn", "horovod"), ("mpirun", "mpi")),
    *(("mpirun", "native"), ("mpirun", "horovod"), ("horovodrun-mpi", "horovod"), ("horovodrun-mpi", "native")),
]


@pytest.fixture(scope="module")
def unhurt(base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every rank reports of a run to which nothing happens."""
    folder = tmp_path_factory.mktemp("unhurt")
    reports = Launch(base_env, folder).reports([*RESTARTING["mpirun"], PROGRAM, str(folder)], SIZE)
    assert [report["begun"] for report in reports] == [[0]] * SIZE
    assert reports[0]["parameters"] == reports[1]["parameters"]
    return reports[0]


def assert_ends_like(unhurt: Mapping[str, Any], reports: list[dict[str, Any]]) -> None:
    """To the bit, having trained on each sample of each epoch once."""
    for report in reports:
        assert report["parameters"] == unhurt["parameters"]
        assert report["seen"] == unhurt["seen"]
    assert_seen_once(reports[0])


# Which rank is lost, on which backend.
LOST = [("native", 0)]
LOST_LONG = [("native", 1), ("horovod", 0), ("horovod", 2)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With --long more cells are tried."""
    is_long = metafunc.config.getoption("--long", default=False)
    if "killed_in" in metafunc.fixturenames:
        cells = [*CELLS, *(LONG if is_long else ())]
        metafunc.parametrize("killed_in", cells, ids=" ".join)
    if "lost" in metafunc.fixturenames:
        metafunc.parametrize("lost", [*LOST, *(LOST_LONG if is_long else ())], ids=str)
    if "told" in metafunc.fixturenames:
        told = TOLD | (TOLD_LONG if is_long else {})
        metafunc.parametrize("told", told.values(), ids=list(told))


def test_a_killed_rank_restarts_the_job_which_ends_like_one_that_was_never_hurt(
    launch: Launch, unhurt: dict[str, Any], tmp_path: Path, killed_in: tuple[str, str]
) -> None:
    """A rank is killed at a random moment, in the middle of whatever it does then."""
    launcher, backend = killed_in
    draw = random.Random(zlib.crc32(f"{launcher} {backend}".encode()))
    rank, step, delay_ms = draw.randrange(SIZE), draw.randrange(2, STEPS - 4), draw.uniform(0, 15)
    fate = f"{rank}@{step}=killed:{delay_ms:.1f}"
    argv = [*RESTARTING[launcher], PROGRAM, str(tmp_path), fate]
    reports = launch.reports(argv, SIZE, env={"DUALDIST_BACKEND": backend})
    (begun,) = {tuple(report["begun"]) for report in reports}
    assert begun[0] >= step - elastic_rank.EVERY, (begun, fate)
    assert begun[0] % elastic_rank.EVERY == 0, (begun, fate)
    assert_ends_like(unhurt, reports)


def test_a_rank_that_is_told_to_stop_stops_all_and_the_job_goes_on(
    launch: Launch, unhurt: dict[str, Any], tmp_path: Path
) -> None:
    """The others learn it from that rank alone; the launcher starts all again, as it would after a failure."""
    argv = [*RESTARTING["torchrun"], PROGRAM, str(tmp_path), "1@7=told:SIGTERM+SIGUSR1+SIGTERM"]
    reports = launch.reports(argv, SIZE, env={"DUALDIST_BACKEND": "horovod"})
    (begun,) = {report["begun"][0] for report in reports}
    assert begun >= 8
    assert_ends_like(unhurt, reports)


# What is told to stop, by which signal, its exit code, and how many workers each rank's loader has.
TOLD = {"dualdist run torchrun": ([*RUN, "torchrun", "--max-restarts", "1"], "native", signal.SIGUSR1, REQUEUE, 1)}
TOLD_LONG = {
    "torchrun": (RESTARTING["torchrun"], "native", signal.SIGTERM, 1, 1),
} | {
    f"dualdist run {name}": ([*RUN, name, "--max-restarts", "1"], backend, number, REQUEUE, workers)
    for name, backend, number, workers in (
        *(("mpirun", "mpi", signal.SIGTERM, 0), ("horovodrun", "horovod", signal.SIGTERM, 0)),
        *(("spawn", "native", signal.SIGTERM, 1), ("horovodrun-mpi", "horovod", signal.SIGUSR1, 0)),
    )
}


def test_a_launcher_that_is_told_to_stop_leaves_one_checkpoint_and_the_job_goes_on(
    launch: Launch, unhurt: dict[str, Any], tmp_path: Path, told: tuple[list[str], str, signal.Signals, int, int]
) -> None:
    argv, backend, number, code, workers = told
    env = {"DUALDIST_BACKEND": backend, "WORKERS": str(workers)}
    line = [*argv, PROGRAM, str(tmp_path), "all@7=waits"]
    with launch.start(line, env=env) as job:
        assert eventually(lambda: len(list(tmp_path.glob("waiting-*"))) == SIZE, within_s=60), job.output()
        psutil.Process(job.pid).children()[0].send_signal(number)
        outcome = job.wait(40)
    assert outcome.rc == code, str(outcome)
    assert not outcome.left, str(outcome)
    assert outcome.stderr.count("dualdist: stopped after a step, as requested by") == 1, str(outcome)
    checkpoints = sorted((tmp_path / "run").glob("*.pt"))
    reports = launch.reports(line, SIZE, env=env)
    (begun,) = {report["begun"][0] for report in reports}
    assert begun >= 8
    assert len({*checkpoints}) == min(3, -(-begun // elastic_rank.EVERY)), "one every three steps, and one at the stop"
    assert_ends_like(unhurt, reports)


def trained_by_one_process() -> list[float]:
    """All samples of the ranks' steps together, in the order of torch's own sampler."""
    model = make_model()
    optimizer = make_optimizer(model)
    sampler = torch.utils.data.DistributedSampler(range(elastic_rank.SAMPLES), 1, 0, seed=elastic_rank.SEED)  # type: ignore[arg-type]
    for epoch in range(elastic_rank.EPOCHS):
        sampler.set_epoch(epoch)
        for samples in torch.tensor(list(sampler)).split(elastic_rank.TOGETHER):
            elastic_rank.step(model, optimizer, samples)
    return flat(model)


def assert_trained(reports: list[dict[str, Any]]) -> None:
    """As by one process, on each sample of each epoch once, however many ranks there were."""
    expected = trained_by_one_process()
    for report in reports:
        assert report["parameters"] == reports[0]["parameters"]
        assert report["parameters"] == pytest.approx(expected, rel=1e-5, abs=1e-6)  # sums in another order
        assert_seen_once(report)


def test_the_ranks_that_are_left_go_on_in_their_processes_until_the_lost_one_is_back(
    launch: Launch, tmp_path: Path, lost: tuple[str, int]
) -> None:
    """Three, two and three again, on one host; what was done since the last commit is done again."""
    backend, rank = lost
    argv = [sys.executable, "-m", "dualdist", "run", "-np", "3", "--min-ranks", "2", "--backend", backend]
    fates = [f"{rank}@5=killed:2", "all@9=waits"]
    reports = launch.reports([*argv, PROGRAM, str(tmp_path), *fates], 3, env={"NOISY": "0"})
    assert sorted(report["sizes"] for report in reports) == [[3], [3, 2, 3], [3, 2, 3]]
    assert_trained(reports)


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_torchruns_agents_go_on_with_fewer_hosts_and_with_more(
    launch: Launch, tmp_path: Path, backend: str, effort: Effort
) -> None:
    """Two, one and two again, each an agent here that meets the other by a store of its own; all ranks start anew."""
    if not effort(False, True):
        pytest.skip("only with --long")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=7"]
    conf = "--rdzv-conf=is_host=false,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8"
    agent = ["torchrun", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--local-addr=127.0.0.1"]
    argv = [*agent, *meeting, conf, PROGRAM, str(tmp_path), "1@5=host-lost", "all@9=waits"]
    reports = tmp_path / "reports"
    reports.mkdir()
    env = {"DUALDIST_BACKEND": backend, "NOISY": "0", REPORT_DIR: str(reports)}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else agents go on looking for the ranks' store where it was first
    with launch.start(argv, env=env) as one, launch.start(argv, env=env) as other:
        assert eventually((tmp_path / "waiting-0.happened").exists, within_s=90), one.output() + other.output()
        (left,) = [job for job in (one, other) if job.is_running()]
        with launch.start(argv, env=env) as back:
            outcomes = [job.wait(90) for job in (left, back)]
    assert [outcome.rc for outcome in outcomes] == [0, 0], "\n".join(map(str, outcomes))
    found = collect(reports, 2, outcomes[0])
    assert [report["sizes"] for report in found] == [[2], [2]]
    assert {report["begun"][0] for report in found} == {10}, "the notice came before step 9, which was done and saved"
    assert_trained(found)

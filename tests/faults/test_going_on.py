"""A job that loses a rank, or is asked to stop, resumes by itself, and ends with the bits of an undisturbed one."""

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
from faults.elastic_rank import assert_seen_once
from harness.effort import Effort
from harness.jobs import REPORT_DIR, Launch, collect
from harness.problem import flat, make_model, make_optimizer
from harness.slurm import eventually

from dualdist.utils.variables import REQUEUE

PROGRAM = elastic_rank.__file__
SIZE = 2
RUN = [sys.executable, "-m", "dualdist", "run", "-np", str(SIZE), "--launcher"]
# Launchers that start the ranks again once.
RESTARTING = {
    "torchrun": ["torchrun", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={SIZE}", "--max-restarts=1"],
    **{name: [*RUN, name, "--max-restarts", "1"] for name in ("horovodrun", "horovodrun-mpi", "mpirun", "spawn")},
}
STEPS = elastic_rank.EPOCHS * elastic_rank.SAMPLES // elastic_rank.GLOBAL_BATCH
# Where a rank is killed: a launcher and a backend. All but the first two only with --long.
KILLED_IN = [
    *(("torchrun", "native"), ("horovodrun", "horovod"), ("torchrun", "horovod"), ("horovodrun", "native")),
    *(("spawn", "native"), ("spawn", "horovod"), ("mpirun", "mpi"), ("mpirun", "native"), ("mpirun", "horovod")),
    *(("horovodrun-mpi", "horovod"), ("horovodrun-mpi", "native")),
]
# The launcher, the backend, the signal, the exit code, and the workers of each rank's loader.
STOPPED = {
    f"dualdist run {name}": ([*RUN, name, "--max-restarts", "1"], backend, number, REQUEUE, workers)
    for name, backend, number, workers in (
        ("torchrun", "native", signal.SIGUSR1, 1),
        *(("mpirun", "mpi", signal.SIGTERM, 0), ("horovodrun", "horovod", signal.SIGTERM, 0)),
        *(("spawn", "native", signal.SIGTERM, 1), ("horovodrun-mpi", "horovod", signal.SIGUSR1, 0)),
    )
} | {"torchrun": (RESTARTING["torchrun"], "native", signal.SIGTERM, 1, 1)}


@pytest.fixture(scope="module")
def unhurt(base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what every rank reports of a run to which nothing happens."""
    folder = tmp_path_factory.mktemp("unhurt")
    reports = Launch(base_env, folder).reports([*RESTARTING["mpirun"], PROGRAM, str(folder)], SIZE)
    assert [report["begun"] for report in reports] == [[0]] * SIZE
    assert reports[0]["parameters"] == reports[1]["parameters"]
    return reports[0]


def assert_ends_like(unhurt: Mapping[str, Any], reports: list[dict[str, Any]]) -> None:
    """Require the same bits, from each sample of each epoch once."""
    for report in reports:
        assert report["parameters"] == unhurt["parameters"]
        assert report["seen"] == unhurt["seen"]
    assert_seen_once(reports[0])


@pytest.mark.parametrize(("launcher", "backend"), KILLED_IN)
def test_a_killed_rank_restarts_the_job_which_ends_with_the_same_bits(
    launch: Launch, unhurt: dict[str, Any], tmp_path: Path, launcher: str, backend: str, effort: Effort
) -> None:
    effort.require_long(unless=(launcher, backend) in KILLED_IN[:2])
    draw = random.Random(zlib.crc32(f"{launcher} {backend}".encode()))
    rank, step, delay_ms = draw.randrange(SIZE), draw.randrange(2, STEPS - 4), draw.uniform(0, 15)
    fate = f"{rank}@{step}=killed:{delay_ms:.1f}"
    argv = [*RESTARTING[launcher], PROGRAM, str(tmp_path), fate]
    reports = launch.reports(argv, SIZE, env={"DUALDIST_BACKEND": backend})
    (begun,) = {tuple(report["begun"]) for report in reports}
    assert begun[0] >= step - elastic_rank.EVERY, (begun, fate)
    assert begun[0] % elastic_rank.EVERY == 0, (begun, fate)
    assert_ends_like(unhurt, reports)


def test_a_rank_that_is_asked_to_stop_stops_all_and_the_job_resumes(
    launch: Launch, unhurt: dict[str, Any], tmp_path: Path
) -> None:
    argv = [*RESTARTING["torchrun"], PROGRAM, str(tmp_path), "1@7=signalled:SIGTERM+SIGUSR1+SIGTERM"]
    reports = launch.reports(argv, SIZE, env={"DUALDIST_BACKEND": "horovod"})
    (begun,) = {report["begun"][0] for report in reports}
    assert begun >= 8
    assert_ends_like(unhurt, reports)


@pytest.mark.parametrize("case", STOPPED)
def test_a_launcher_that_is_asked_to_stop_leaves_one_checkpoint_and_the_job_resumes(
    launch: Launch, unhurt: dict[str, Any], tmp_path: Path, case: str, effort: Effort
) -> None:
    effort.require_long(unless=case == "dualdist run torchrun")
    argv, backend, number, code, workers = STOPPED[case]
    env = {"DUALDIST_BACKEND": backend, "WORKERS": str(workers)}
    line = [*argv, PROGRAM, str(tmp_path), "all@7=waits"]
    with launch.start(line, env=env) as job:
        job.wait_until(lambda: len(list(tmp_path.glob("waiting-*"))) == SIZE)
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
    """Return the parameters after steps on global batches, in the order of torch's own sampler."""
    model = make_model()
    optimizer = make_optimizer(model)
    sampler = torch.utils.data.DistributedSampler(range(elastic_rank.SAMPLES), 1, 0, seed=elastic_rank.SEED)  # type: ignore[arg-type]
    for epoch in range(elastic_rank.EPOCHS):
        sampler.set_epoch(epoch)
        for samples in torch.tensor(list(sampler)).split(elastic_rank.GLOBAL_BATCH):
            elastic_rank.step(model, optimizer, samples)
    return flat(model)


def assert_trained(reports: list[dict[str, Any]]) -> None:
    """Require the parameters of one process, from each sample of each epoch once, however many ranks there were."""
    expected = trained_by_one_process()
    for report in reports:
        assert report["parameters"] == reports[0]["parameters"]
        assert report["parameters"] == pytest.approx(expected, rel=1e-5, abs=1e-6)  # sums in another order
        assert_seen_once(report)


@pytest.mark.parametrize(("backend", "rank"), [("native", 0), ("native", 1), ("horovod", 0), ("horovod", 2)])
def test_remaining_ranks_continue_in_their_processes_until_the_lost_one_is_back(
    launch: Launch, tmp_path: Path, backend: str, rank: int, effort: Effort
) -> None:
    """Three, two and three ranks, on one host; steps since the last commit are repeated."""
    effort.require_long(unless=(backend, rank) == ("native", 0))
    argv = [sys.executable, "-m", "dualdist", "run", "-np", "3", "--min-ranks", "2", "--backend", backend]
    fates = [f"{rank}@5=killed:2", "all@9=waits"]
    reports = launch.reports([*argv, PROGRAM, str(tmp_path), *fates], 3, env={"NOISY": "0"})
    assert sorted(report["sizes"] for report in reports) == [[3], [3, 2, 3], [3, 2, 3]]
    assert_trained(reports)


@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_torchruns_agents_continue_with_fewer_hosts_and_with_more(
    launch: Launch, tmp_path: Path, backend: str, effort: Effort
) -> None:
    """Two, one and two agents, which meet in a separate store; all ranks start again each time."""
    effort.require_long(unless=False)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=7"]
    conf = "--rdzv-conf=is_host=false,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8"
    agent = ["torchrun", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--local-addr=127.0.0.1"]
    argv = [*agent, *rendezvous, conf, PROGRAM, str(tmp_path), "1@5=host-lost", "all@9=waits"]
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

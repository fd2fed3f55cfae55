"""A job script that is signalled to stop lets its ranks save and requeues the job, which resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from faults import elastic_rank
from harness import slurm
from harness.installed import lack
from harness.jobs import REPORT_DIR, Launch
from harness.slurm import eventually
from launch.running import RUN

PROGRAM = elastic_rank.__file__
SIZE = 2
WITHIN_S = 60


def record(launch: Launch, cluster: slurm.Slurm, job: str) -> dict[str, str]:
    """Return Slurm's record of the job."""
    shown = launch(["scontrol", "--oneliner", "show", "job", job], env=cluster.env)
    return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))


@pytest.fixture
def hasty(base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """Yield a cluster in which a requeued job starts soon."""
    if lacking := slurm.missing(base_env["PATH"]):
        lack(", ".join(lacking), slurm.PACKAGES)
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), base_env, credential_s=10) as cluster:
        yield cluster
        cluster.cancel_all()


def test_slurm_requeues_a_job_that_it_signalled(hasty: slurm.Slurm, launch: Launch) -> None:
    """By the signal that the script's --signal requests."""
    folder = launch.directory / "reports"
    folder.mkdir()
    asked = ("--scheduler", "slurm", "--nodes", str(SIZE), "--time", "0:10:00", "--requeue", "120", "--write", "job.sh")
    launch([*RUN, *asked, PROGRAM, str(launch.directory), "all@7=waits"])
    job = launch(["sbatch", "--parsable", "job.sh"], env={**hasty.env, REPORT_DIR: str(folder)}).stdout.strip()
    assert record(launch, hasty, job)["Requeue"] == "1"

    def output() -> str:
        return "\n".join(path.read_text() for path in Path(launch.directory).glob("*.out"))

    assert eventually(lambda: len(list(launch.directory.glob("waiting-*"))) == SIZE, within_s=WITHIN_S), output()
    launch(["scancel", "--batch", "--signal=USR1", job], env=hasty.env)
    requeued = lambda: record(launch, hasty, job)["JobState"] == "PENDING" or not hasty.queue()  # noqa: E731
    assert eventually(requeued, within_s=WITHIN_S), output()
    assert record(launch, hasty, job)["Restarts"] == "1", output()
    assert not list(launch.directory.glob(".dualdist-stop*"))
    assert eventually(lambda: not hasty.queue(), within_s=WITHIN_S), output()
    assert record(launch, hasty, job)["JobState"] == "COMPLETED", output()
    assert output().count("dualdist: stopped after a step, as requested by the file") == 1, output()
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]
    assert reports[0]["parameters"] == reports[1]["parameters"]
    assert {report["begun"][0] >= 8 for report in reports} == {True}
    elastic_rank.assert_seen_once(reports[0])


def test_a_pbs_script_stops_by_the_clock_and_exits_with_75_until_the_job_is_done(launch: Launch) -> None:
    """There is no PBS here: this is what qsub runs on one node. torchrun itself exits with 1."""
    asked = ("--scheduler", "pbs", "--launcher", "torchrun", "--tasks-per-node", str(SIZE), "--time", "0:01:00")
    launch([*RUN, *asked, "--requeue", "52", "--write", "job.sh", PROGRAM, str(launch.directory), "all@7=waits"])
    env = {"PBS_O_WORKDIR": str(launch.directory), "PBS_JOBID": "7.server"}
    first = launch(["bash", "job.sh"], env=env, check=False)
    assert first.rc == 75, str(first)
    assert "exitcode  : 75" in first.stderr, str(first)
    again = launch.reports(["bash", "-c", "until bash job.sh; do [ $? = 75 ] || exit 1; done"], SIZE, env=env)
    assert again[0]["begun"][0] >= 8
    elastic_rank.assert_seen_once(again[0])
    assert not list(launch.directory.glob(".dualdist-stop*"))

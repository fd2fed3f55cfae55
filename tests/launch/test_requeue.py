"""A job script that is told to stop has its ranks save, and the job queued again, where it goes on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from faults import elastic_rank
from harness import slurm
from harness.installed import lack
from harness.jobs import REPORT_DIR, Launch
from harness.slurm import eventually

PROGRAM = elastic_rank.__file__
RUN = (sys.executable, "-m", "dualdist", "run")
SIZE = 2
WITHIN_S = 60


def told(cluster: slurm.Slurm, *argv: str) -> str:
    done = subprocess.run(argv, env=dict(cluster.env), capture_output=True, text=True, timeout=WITHIN_S, check=True)
    return done.stdout


def record(cluster: slurm.Slurm, job: str) -> dict[str, str]:
    """What Slurm says of the job."""
    return dict(re.findall(r"(\w+)=(\S*)", told(cluster, "scontrol", "--oneliner", "show", "job", job)))


@pytest.fixture
def hasty(base_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    """A cluster in which a job that is queued again starts soon."""
    if lacking := slurm.missing(base_env["PATH"]):
        lack(", ".join(lacking), slurm.PACKAGES)
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), base_env, credential_s=10) as cluster:
        yield cluster
        cluster.cancel_all()


def test_slurm_queues_a_job_again_that_it_told_to_stop(hasty: slurm.Slurm, launch: Launch) -> None:
    """By the very signal that --signal asks for."""
    folder = launch.directory / "reports"
    folder.mkdir()
    asked = ("--scheduler", "slurm", "--nodes", str(SIZE), "--time", "0:10:00", "--requeue", "120", "--write", "job.sh")
    launch([*RUN, *asked, PROGRAM, str(launch.directory), "all@7=waits"])
    env = {**launch.env, **hasty.env, REPORT_DIR: str(folder)}
    submitted = subprocess.run(
        ["sbatch", "--parsable", "job.sh"], env=env, cwd=launch.directory, capture_output=True, text=True, check=True
    )
    job = submitted.stdout.strip()
    assert record(hasty, job)["Requeue"] == "1"

    def output() -> str:
        return "\n".join(path.read_text() for path in Path(launch.directory).glob("*.out"))

    assert eventually(lambda: len(list(launch.directory.glob("waiting-*"))) == SIZE, within_s=WITHIN_S), output()
    told(hasty, "scancel", "--batch", "--signal=USR1", job)
    assert eventually(lambda: record(hasty, job)["JobState"] == "PENDING" or not hasty.queue(), within_s=WITHIN_S), (
        output()
    )
    assert record(hasty, job)["Restarts"] == "1", output()
    assert not list(launch.directory.glob(".dualdist-stop*"))
    assert eventually(lambda: not hasty.queue(), within_s=WITHIN_S), output()
    assert record(hasty, job)["JobState"] == "COMPLETED", f"{record(hasty, job)}\n{output()}"
    assert output().count("dualdist: stopped after a step, as requested by the file") == 1, output()
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]
    assert reports[0]["parameters"] == reports[1]["parameters"]
    assert {report["begun"][0] >= 8 for report in reports} == {True}
    elastic_rank.assert_seen_once(reports[0])


def test_a_pbs_script_tells_by_the_clock_and_ends_with_75_until_the_job_is_done(launch: Launch) -> None:
    """There is no PBS here: this is what qsub runs on one node. torchrun itself ends with 1."""
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

"""Where a benchmark's ranks run: -H, host files, and allocations of Slurm and PBS; and the commands that follow."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from dualdist.bench.jobs import MeasurementSettings, RunConfig, program_command
from dualdist.bench.placement import HERE, Placement, find_placement
from dualdist.errors import DualdistError
from dualdist.launch.job import Host, Site

SITE = Site("/v/python", {"torchrun": "/v/torchrun", "srun": "/v/srun"}, "/v", "openmpi4", task_cpus=1)
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
TASKS = {**SLURM, "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3,1"}


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Variables with a `scontrol` that knows two nodes, and a file of PBS's nodes."""
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames n[1-2]' ] && printf 'n1\\nn2\\n'\n")
    tool.chmod(0o755)
    (tmp_path / "nodes").write_text("p1.site\np1.site\np2.site\np2.site\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "PBS_NODEFILE": str(tmp_path / "nodes")}


@pytest.mark.parametrize(
    ("variables", "hosts", "ranks", "expected"),
    [
        ({}, None, None, "@2"),
        ({}, None, 4, "@4"),
        ({}, "localhost:3", None, "@3"),
        ({}, "a:2,b:2", None, "a:2,b:2@4"),
        ({}, "a:2,b:2", 3, "a:2,b:1@3"),
        ({}, "a:2,b:2", 2, "a:2@2"),
        (TASKS, None, None, "n1:3,n2:1@4 slurm"),
        (TASKS, None, 8, "n1:4,n2:4@8 slurm"),
        (TASKS, "n2:2", None, "n2:2@2 slurm"),
        (SLURM, None, None, "n1:1,n2:1@2 slurm"),
        ({**TASKS, "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}, None, None, "@2"),  # a step, in which srun would wait
        ({"PBS_JOBID": "7.site"}, None, None, "p1.site:2,p2.site:2@4"),
        ({**TASKS, "SLURM_TASKS_PER_NODE": "2(x2"}, None, None, "SLURM_TASKS_PER_NODE='2(x2': expected counts"),
        (TASKS, None, 3, "3 ranks on the 2 nodes of this allocation (n1,n2): expected a multiple of 2, or -H"),
        ({**SLURM, "SLURM_JOB_NODELIST": "x[]"}, None, None, "`scontrol show hostnames x[]` names no nodes"),
        ({}, "a:2,b:2", 5, "5 ranks on hosts with 4 slots"),
    ],
)
def test_ranks_are_on_the_hosts_of_the_option_or_of_the_allocation(
    environ: Mapping[str, str], variables: Mapping[str, str], hosts: str | None, ranks: int | None, expected: str
) -> None:
    try:
        placement, count = find_placement(hosts, None, None, ranks, {**environ, **variables})
        found = f"{placement}@{count}{' slurm' if placement.is_slurm else ''}"
    except DualdistError as error:
        found = str(error)
    assert found.startswith(expected)


def test_other_hosts_are_reached_by_dualdist_run_and_by_srun_itself() -> None:
    hosts = (Host("a", 2), Host("b", 1))
    settings = MeasurementSettings(3, SITE, 2, env={"A": "b"}, placement=Placement(hosts, "ib0"))
    found = program_command(RunConfig("native", "gloo", "torchrun"), ("-m", "x"), settings)
    assert " ".join(found.argv) == (
        "/v/python -m dualdist run -np 3 -H a:2,b:1 --launcher torchrun --backend native --transport gloo "
        "--network-interface ib0 --env OMP_NUM_THREADS --env A -m x"
    )
    assert found.env == {"OMP_NUM_THREADS": "2", "A": "b"}
    found = program_command(RunConfig("native", "gloo", "srun"), ("x.py",), settings)
    assert "--distribution=arbitrary --nodelist=a,a,b --ntasks=3 --cpus-per-task=2" in " ".join(found.argv)
    assert found.env["GLOO_SOCKET_IFNAME"] == "ib0"
    here = program_command(RunConfig("native", "gloo", "torchrun"), ("x.py",), MeasurementSettings(3, SITE))
    assert (here.argv[0], HERE.hosts) == ("/v/torchrun", ())

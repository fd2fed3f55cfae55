"""The doctor inside a real Slurm: scripts with one task, one task with all GPUs, an srun without PMIx."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.jobs import Launch
from harness.slurm import Slurm

# Without site-packages: torch is not needed, and its import takes long.
DOCTOR = (sys.executable, "-S", "-m", "dualdist", "doctor", "--json")


def batch(slurm: Slurm, launch: Launch, options: tuple[str, ...], *before: str) -> list[dict[str, dict[str, Any]]]:
    """Return the doctor's findings in a batch script, started after each of these words."""
    files = [launch.directory / f"report-{number}.json" for number in range(len(before))]
    lines = [f"{words} {shlex.join([*DOCTOR, str(file)])}" for words, file in zip(before, files, strict=True)]
    path = launch.directory / "batch.sh"
    path.write_text("\n".join(["#!/bin/sh", *lines, "exit 0", ""]))
    launch([*slurm.sbatch(*options), str(path)], env=slurm.env)
    return [{each["name"]: each for each in json.loads(file.read_text())["findings"]} for file in files]


@pytest.mark.smoke
def test_a_script_and_its_one_task_get_a_fix(slurm: Slurm, launch: Launch) -> None:
    srun = "srun -N1 -n1 --gres=gpu:2 --mpi=none"
    script, task, step = batch(slurm, launch, ("-N2", "-n4", "--gres=gpu:2"), "", srun, "srun -n4 --mpi=none")
    assert "SLURM_NTASKS=4, but this process is not a task" in script["slurm-one-process"]["message"]
    assert "srun -n 4 python script.py" in script["slurm-one-process"]["fix"]
    assert script["slurm-one-process"]["level"] == "warning"
    assert "srun started one task with 2 GPUs (0,1)" in task["slurm-one-task"]["message"]
    assert not {"slurm-one-process", "slurm-one-task"} & step.keys()


def test_a_script_that_names_no_number_of_tasks(slurm: Slurm, launch: Launch) -> None:
    (script,) = batch(slurm, launch, ("-N2",), "")
    assert "SLURM_JOB_NUM_NODES=2, but this process is not a task" in script["slurm-one-process"]["message"]
    (script,) = batch(slurm, launch, ("-N1", "-n1", "--gres=gpu:2"), "")
    assert "this batch script is a single task with 2 GPUs (0,1)" in script["slurm-one-task"]["message"]


def test_an_srun_without_pmix(slurm: Slurm, launch: Launch) -> None:
    """As a Slurm that was built without it: the same plug-ins, except PMIx's."""
    config = launch(["scontrol", "show", "config"], env=slurm.env).stdout
    (line,) = [line for line in config.splitlines() if line.startswith("PluginDir")]
    folder = launch.directory / "plugins"
    folder.mkdir()
    for plugin in Path(line.partition("=")[2].strip()).iterdir():
        if not plugin.name.startswith(("mpi_pmix", "mpi_cray")):
            (folder / plugin.name).symlink_to(plugin)
    own = launch.directory / "slurm.conf"
    own.write_text(f"{Path(slurm.env['SLURM_CONF']).read_text()}PluginDir={folder}\n")
    for conf, backend, level in ((own, "native", "info"), (own, "mpi", "error"), (slurm.env["SLURM_CONF"], "mpi", "")):
        env = {**slurm.env, "SLURM_CONF": str(conf), "DUALDIST_BACKEND": backend}
        report = json.loads(launch([*DOCTOR, "-"], env=env, check=False).stdout)
        found = {each["name"]: each for each in report["findings"]}
        assert found.get("srun-without-pmix", {"level": ""})["level"] == level, report

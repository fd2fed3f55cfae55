"""Job scripts: for each scheduler a pure function from a ScriptRequest to the text that a person submits."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from dualdist.errors import UsageError
from dualdist.launch.schedulers.request import ScriptRequest
from dualdist.utils.suggest import require_choice


@dataclass(frozen=True)
class Scheduler:
    """A module of this package with script(request), the inner launchers that it knows, the default first.

    `submit` is the command that takes the text on its standard input, None where there is nobody to submit it to.
    """

    module: str
    launchers: tuple[str, ...]
    submit: tuple[str, ...] | None


SCHEDULERS = {
    "slurm": Scheduler("slurm", ("srun", "torchrun", "mpirun", "horovodrun"), ("sbatch",)),
    "pbs": Scheduler("pbs", ("torchrun", "mpirun", "horovodrun"), ("qsub",)),
    "lsf": Scheduler("lsf", ("jsrun", "mpirun"), ("bsub",)),
    "kubernetes": Scheduler("kubernetes", ("torchrun", "mpirun"), ("kubectl", "create", "-f", "-")),
    "ssh": Scheduler("ssh", ("torchrun", "mpirun", "horovodrun"), None),
    "workstation": Scheduler("workstation", ("torchrun", "mpirun", "horovodrun"), None),
}


def find_scheduler(name: str) -> Scheduler:
    """The scheduler of this name; UsageError lists those that there are."""
    return SCHEDULERS[require_choice(name, SCHEDULERS, "scheduler")]


def job_script(name: str, request: ScriptRequest) -> str:
    """The job script by which this scheduler runs what is requested; UsageError where it cannot."""
    scheduler = find_scheduler(name)
    require_choice(request.launcher, scheduler.launchers, "launcher", f" under {name}")
    if request.requeue is not None and scheduler.submit is None:
        raise UsageError(f"--requeue with the scheduler {name}: there is no queue; dualdist run has --max-restarts")
    text = importlib.import_module(f"dualdist.launch.schedulers.{scheduler.module}").script(request)
    assert isinstance(text, str)
    return text


__all__ = ["SCHEDULERS", "Scheduler", "ScriptRequest", "find", "script"]

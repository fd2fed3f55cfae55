"""Jobs of a benchmark: where they run, the launcher's command line, and the reports of their ranks."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.bench.statistics import foreign_cores
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.execute import run_command
from dualdist.launch.failure import find_exception
from dualdist.launch.job import Command, Job, Site
from dualdist.launch.launchers import LAUNCHERS, build_command
from dualdist.utils.machine import CpuUse, read_cpu
from dualdist.utils.redaction import make_redactor, redact_command, redact_variables
from dualdist.utils.suggest import require_choice

WORKER = ("-m", "dualdist.bench.ranks.worker")
SPAWN = "spawn"
OUTPUT_LINES = 30  # of a failed job, in the error
FOREIGN = "foreign_cores_of_job"  # in every report: CPU use of other processes while the job ran


@dataclass(frozen=True)
class RunConfig:
    """Backend, transport (None for the backend's default) and launcher of a job."""

    backend: str
    transport: str | None
    launcher: str

    def __str__(self) -> str:
        return f"{self.backend}{f' over {self.transport}' if self.transport else ''}, {self.launcher}"


def parse_configs(text: str, transport: str | None, launcher: str | None) -> list[RunConfig]:
    """Parse `native,horovod:mpi`; `transport` and `launcher` apply to backends that do not name one."""
    if launcher is not None:
        require_choice(launcher, LAUNCHERS, "launcher")
    found = []
    for word in text.split(","):
        backend, _, own = word.strip().partition(":")
        chosen = own or transport
        require_choice(backend, registry.names(), "backend", ", or several with commas between, as native,horovod:mpi")
        if chosen is not None:
            require_choice(chosen, registry.transports(), "transport")
        default = "mpirun" if registry.needs_mpi(backend, chosen) else "torchrun"
        found.append(RunConfig(backend, chosen, launcher or default))
    if len(set(found)) < len(found):
        raise UsageError(f"backends {text!r}: name each once")
    return found


@dataclass(frozen=True)
class MeasurementSettings:
    """Settings shared by the jobs of a benchmark; `env` is set for every rank, `timeout_s` limits a whole job."""

    ranks: int
    threads: int = 1
    device: str = "auto"
    timeout_s: float = 1800.0
    wait_s: float = 300.0  # for another rank
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ranks", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected 1 or more")
        if self.timeout_s <= 0:
            raise UsageError(f"timeout {self.timeout_s:g}: expected seconds above 0")

    def variables(self) -> dict[str, str]:
        no_gpu = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        return {"OMP_NUM_THREADS": str(self.threads), **no_gpu, **self.env}


def parse_env(assignments: Sequence[str]) -> dict[str, str]:
    """Parse the NAME=VALUE arguments of --env."""
    for assignment in assignments:
        if not assignment.partition("=")[1]:
            raise UsageError(f"--env {assignment}: expected NAME=VALUE")
    return {name: value for name, _, value in (assignment.partition("=") for assignment in assignments)}


@dataclass(frozen=True)
class PlannedJob:
    """A job to launch and the files in which its ranks leave their reports; `tags` say what the job measures."""

    title: str
    command: Command
    reports: tuple[Path, ...]
    tags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def command_line(self) -> str:
        """The command in shell syntax, with the values of secrets hidden."""
        variables = [f"{name}={value}" for name, value in redact_variables(self.command.env).items()]
        return shlex.join([*(["env", *variables] if variables else []), *redact_command(self.command.argv)])


def worker_command(config: RunConfig, arguments: Sequence[str], settings: MeasurementSettings, site: Site) -> Command:
    """Return the command that runs the worker with these arguments on every rank."""
    spawn = (f"--spawn={settings.ranks}",) if config.launcher == SPAWN else ()
    common = (f"--device={settings.device}", f"--timeout-s={settings.wait_s:g}")
    return program_command(config, (*WORKER, *spawn, *arguments, *common), settings, site)


def program_command(config: RunConfig, program: tuple[str, ...], settings: MeasurementSettings, site: Site) -> Command:
    """Return the command that runs the program on every rank, or once if it spawns its ranks."""
    spawns = config.launcher == SPAWN
    site = replace(site, task_cpus=settings.threads)
    ranks = 1 if spawns else settings.ranks
    job = Job(program, ranks, config.backend, config.transport, settings.variables())
    return build_command("python" if spawns else config.launcher, job, site)


def run_job(planned: PlannedJob, timeout_s: float) -> list[dict[str, Any]]:
    """Run the job and return its reports.

    Raises:
        LaunchError: the job failed or left no report; with the end of its output, secret values redacted.
    """
    before, redact = read_cpu(children=True), make_redactor(planned.command.env)
    try:
        result = run_command(planned.command, timeout_s=timeout_s, what=planned.title)
    except LaunchError as error:
        raise LaunchError(redact(str(error))) from error
    foreign = foreign_cores([CpuUse.between(before, read_cpu(children=True))])
    missing = [path for path in planned.reports if not path.exists()]
    if result.code != 0 or missing:
        output = re.sub(f"^(?:{planned.command.prefix})", "", result.output.strip(), flags=re.MULTILINE)
        shown, exception = "\n".join(output.splitlines()[-OUTPUT_LINES:]), find_exception(output)
        if exception is not None and exception not in shown:  # torchrun prints about as many lines after it
            shown = f"{exception}\n[...]\n{shown}"
        why = f"exit code {result.code}" if result.code else "it left no report"
        raise LaunchError(f"{planned.title} failed ({why}): {planned.command_line}\n{redact(shown)}")
    return [{**json.loads(path.read_text()), FOREIGN: foreign} for path in planned.reports]

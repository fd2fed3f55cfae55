"""From a measurement to the launcher's command lines, and to the reports that the ranks leave."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dualdist.errors import LaunchError, UsageError
from dualdist.launch.execute import run_command
from dualdist.launch.failure import find_exception
from dualdist.launch.launchers import LAUNCHERS, Command, Job, Site, build_command
from dualdist.rendezvous.backend_selection import BACKENDS, TRANSPORTS
from dualdist.utils.machine import CpuUse, foreign_cores, read_cpu
from dualdist.utils.redaction import make_redactor, redact_command, redact_variables
from dualdist.utils.suggest import did_you_mean, require_choice

WORKER = ("-m", "dualdist.bench.ranks.worker")
SPAWNED = ("-m", "dualdist.bench.ranks.spawned")
SPAWN = "spawn"
CHOICES = tuple(LAUNCHERS)
SHOWN_LINES = 30
FOREIGN = "foreign_cores_of_job"  # in every report: what others did to the machine from the job's start to its end


@dataclass(frozen=True)
class RunConfig:
    """Where a job runs: a backend, its transport (None for the backend's own choice), and what starts the ranks."""

    backend: str
    transport: str | None
    launcher: str

    def __str__(self) -> str:
        return f"{self.backend}{f' over {self.transport}' if self.transport else ''}, {self.launcher}"


def parse_configs(text: str, transport: str | None, launcher: str | None) -> list[RunConfig]:
    """The places of `native,horovod:mpi`: backends, each with a transport of its own or the one that is given."""
    if launcher is not None:
        require_choice(launcher, CHOICES, "launcher")
    found = []
    for word in text.split(","):
        backend, _, own = word.strip().partition(":")
        chosen = own or transport
        if backend not in BACKENDS or backend == "auto":
            valid = ", ".join(name for name in BACKENDS if name != "auto")
            raise UsageError(
                f"backend {backend!r}: expected {valid}, or several with commas between, as native,horovod:mpi"
                + did_you_mean(backend, BACKENDS)
            )
        if chosen is not None:
            require_choice(chosen, TRANSPORTS, "transport")
        found.append(RunConfig(backend, chosen, launcher or _launcher(backend, chosen)))
    if len(set(found)) < len(found):
        raise UsageError(f"backends {text!r}: name each once")
    return found


def _launcher(backend: str, transport: str | None) -> str:
    return "mpirun" if "mpi" in (backend, transport) else "torchrun"


@dataclass(frozen=True)
class MeasurementSettings:
    """What all jobs of a measurement share. `env` is set for every rank; `timeout_s` is a whole job's."""

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
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        return {"OMP_NUM_THREADS": str(self.threads), **hidden, **self.env}


@dataclass(frozen=True)
class PlannedJob:
    """A job to be launched, and the files in which it leaves its reports."""

    title: str
    command: Command
    reports: tuple[Path, ...]
    tags: Mapping[str, Any] = field(default_factory=dict)  # by which its reports are told apart

    @property
    def command_line(self) -> str:
        """The command as one would type it in a shell, without the values of secrets: it is shown and kept."""
        variables = [f"{name}={value}" for name, value in redact_variables(self.command.env).items()]
        return shlex.join([*(["env", *variables] if variables else []), *redact_command(self.command.argv)])


def worker_command(place: RunConfig, words: Sequence[str], setting: MeasurementSettings, site: Site) -> Command:
    """The command that runs the worker with these words on every rank."""
    words = (*words, f"--device={setting.device}", f"--timeout-s={setting.wait_s:g}")
    program = (*SPAWNED, str(setting.ranks), *words) if place.launcher == SPAWN else (*WORKER, *words)
    return program_command(place, program, setting, site)


def program_command(place: RunConfig, program: tuple[str, ...], setting: MeasurementSettings, site: Site) -> Command:
    """The command that runs the program on every rank, or once where it spawns them itself."""
    spawns = place.launcher == SPAWN
    ranks = 1 if spawns else setting.ranks
    if place.launcher == "srun":  # which gives a rank one core, whatever its threads, if it is not told
        site = replace(site, task_cpus=setting.threads)
    job = Job(program, ranks, place.backend, place.transport, setting.variables())
    return build_command("python" if spawns else place.launcher, job, site)


def run_job(planned: PlannedJob, timeout_s: float) -> list[dict[str, Any]]:
    """The reports of the job, after it has ended; LaunchError where it failed, with the end of what it printed, in
    which the values of its own secret variables are hidden.
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
        shown, told = "\n".join(output.splitlines()[-SHOWN_LINES:]), find_exception(output)
        if told is not None and told not in shown:  # torchrun alone has as many lines to say after it
            shown = f"{told}\n[...]\n{shown}"
        why = f"exit code {result.code}" if result.code else "it left no report"
        raise LaunchError(f"{planned.title} failed ({why}): {planned.command_line}\n{redact(shown)}")
    return [{**json.loads(path.read_text()), FOREIGN: foreign} for path in planned.reports]

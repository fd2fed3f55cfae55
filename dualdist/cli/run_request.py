"""What was asked of `dualdist run`: the command line, over the job file where one was named."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dualdist.errors import UsageError
from dualdist.horovod_build.record import read_record
from dualdist.launch import hosts as host_lists
from dualdist.launch.hosts import is_local_host
from dualdist.launch.job import VARIABLE_NAME, Host, Job, JobChoices, find_conflicts, slots_error
from dualdist.launch.launchers import check_launcher
from dualdist.launch.runner import RunSettings
from dualdist.launch.schedulers import SCHEDULERS

# Schedulers that choose the nodes: a job file's hosts are not theirs.
CHOOSING = [name for name, scheduler in SCHEDULERS.items() if scheduler.submit is not None]


@dataclass(frozen=True)
class RunRequest:
    """A job as it was asked for. `words` is the program and its arguments.

    `ranks_asked` is None where nobody said how many; `resources` are for a scheduler. Of the variables in `env`,
    `handed_on` were given by their names alone.
    """

    words: tuple[str, ...]
    ranks: int
    is_module: bool = False
    as_horovod: bool = False
    launcher: str | None = None
    backend: str | None = None
    transport: str | None = None
    hosts: tuple[Host, ...] = ()
    interface: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    min_ranks: int | None = None
    timeout_s: float | None = None
    log_dir: str | None = None
    tag_output: bool = False
    ranks_asked: int | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    handed_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts}: expected 0 or more")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise UsageError(f"--timeout {self.timeout_s:g}: expected seconds above 0")

    def require_possible(self, launcher: str) -> None:
        """UsageError where what was asked for cannot go together."""
        record = read_record()
        choice = JobChoices(
            check_launcher(launcher), self.backend, self.transport, self.ranks, bool(self.hosts), self.min_ranks
        )
        for found in find_conflicts(choice, horovod_has_mpi=None if record is None else record.mpi):
            raise UsageError(found.message)

    def here(self) -> RunRequest:
        """The same without hosts, where all that were named are this one."""
        return replace(self, hosts=()) if all(is_local_host(host.name) for host in self.hosts) else self

    def job(self, program: tuple[str, ...]) -> Job:
        return Job(
            program,
            self.ranks,
            self.backend,
            self.transport,
            self.env,
            self.hosts,
            None,
            self.interface,
            self.max_restarts,
            self.min_ranks,
        )

    def settings(self, args: argparse.Namespace) -> RunSettings:
        return RunSettings(
            is_dry=args.dry_run,
            stdout_to_stderr=args.json == "-",
            timeout_s=self.timeout_s,
            log_dir=self.log_dir,
            tag_output=self.tag_output,
        )


def parse_run_request(args: argparse.Namespace, environ: Mapping[str, str]) -> RunRequest:
    """The request of a command line; what it leaves open, the job file may say."""
    asked = _of_file(Path(args.config)) if args.config is not None else {}
    words = tuple(args.program[1:] if args.program[:1] == ["--"] else args.program)
    if words:
        asked.update(words=words, is_module=args.is_module)
    elif args.is_module:
        raise UsageError("-m names no module: expected dualdist run [option ...] -m module")
    given = {
        "launcher": args.launcher,
        "backend": args.backend,
        "transport": args.transport,
        "interface": args.network_interface,
        "max_restarts": args.max_restarts,
        "min_ranks": args.min_ranks,
        "timeout_s": args.timeout,
        "log_dir": args.log_dir,
        "as_horovod": args.as_horovod or None,
        "tag_output": args.tag_output or None,
        "hosts": _hosts(args.hosts, args.hostfile),
        "ranks": args.ranks,
    }
    asked.update({name: value for name, value in given.items() if value is not None})
    asked["env"] = {**asked.get("env", {}), **_variables(args.env, environ)}
    asked["handed_on"] = tuple(word for word in args.env if "=" not in word)
    asked["ranks_asked"] = asked.get("ranks")
    hosts = asked.get("hosts", ())
    asked.setdefault("ranks", sum(host.slots for host in hosts) or 1)
    if args.scheduler not in CHOOSING and (why := slots_error(asked["ranks"], hosts)):
        raise UsageError(why)
    return RunRequest(**{"words": (), **asked})


def _of_file(path: Path) -> dict[str, Any]:
    """What the job file says. Its relative paths are of the folder in which the command is given, as on the line."""
    try:
        loading = importlib.import_module("dualdist.launch.job_file")
    except ModuleNotFoundError as error:
        raise UsageError(f"--config needs {error.name}: pip install 'dualdist[job]'") from error
    record = read_record()
    job = loading.load(path, horovod_has_mpi=None if record is None else record.mpi)
    said = {
        "launcher": job.launcher,
        "backend": job.backend,
        "transport": job.transport,
        "interface": job.network_interface,
        "timeout_s": job.timeout,
        "log_dir": job.log_dir,
        "ranks": job.ranks,
        "min_ranks": job.min_ranks,
        "hosts": _hosts(",".join(job.hosts) or None, job.hostfile),
    }
    found = {name: value for name, value in said.items() if value is not None}
    found.update(max_restarts=job.max_restarts, tag_output=job.tag_output, as_horovod=job.as_horovod, env=job.env)
    found["resources"] = job.resources.model_dump()
    if job.program is not None or job.module is not None:
        found.update(words=(job.module or job.program, *job.args), is_module=job.module is not None)
    return found


def _hosts(listed: str | None, file: str | None) -> tuple[Host, ...] | None:
    if listed is not None and file is not None:
        raise UsageError("-H and --hostfile both say where to run: give one of them")
    if listed is not None:
        return host_lists.parse_hosts(listed)
    return host_lists.read_hostfile(Path(file)) if file is not None else None


def _variables(words: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not VARIABLE_NAME.fullmatch(name):
            raise UsageError(f"--env {word}: expected a variable's name and its value, as in --env NCCL_DEBUG=INFO")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: it is not set here; set it, or give a value, as in --env NCCL_DEBUG=INFO")
        found[name] = value if equals else environ[name]
    return found

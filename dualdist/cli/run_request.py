"""The request to `dualdist run`: the options of its command line, which override those of a job file."""

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
from dualdist.launch.job import VARIABLE_NAME, Host, Job, slots_error
from dualdist.launch.launchers import find_conflicts
from dualdist.launch.runner import RunSettings
from dualdist.launch.schedulers import SCHEDULERS

# Schedulers that choose the nodes, so that the hosts of a job file do not limit the ranks.
NODE_CHOOSING = [name for name, scheduler in SCHEDULERS.items() if scheduler.submit is not None]


@dataclass(frozen=True)
class RunRequest:
    """The options of a job.

    `words` is the program and its arguments. `given_ranks` is None if `ranks` is a default. `resources` are for a
    scheduler. `handed_on` are the variables in `env` that were given without a value.
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
    given_ranks: int | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    handed_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts}: expected 0 or more")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise UsageError(f"--timeout {self.timeout_s:g}: expected seconds above 0")

    def require_possible(self, launcher: str) -> None:
        """Raise UsageError if options exclude each other."""
        record = read_record()
        for _, message in find_conflicts(
            launcher,
            self.backend,
            self.transport,
            ranks=self.ranks,
            has_hosts=bool(self.hosts),
            min_ranks=self.min_ranks,
            horovod_has_mpi=None if record is None else record.mpi,
        ):
            raise UsageError(message)

    def without_local_hosts(self) -> RunRequest:
        """Return the request without hosts if all of them are this one."""
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
    """Return the request of a command line and its job file."""
    options = _from_file(Path(args.config), args.scheduler is not None) if args.config is not None else {}
    words = tuple(args.program[1:] if args.program[:1] == ["--"] else args.program)
    if words:
        options.update(words=words, is_module=args.is_module)
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
    options.update({name: value for name, value in given.items() if value is not None})
    options["env"] = {**options.get("env", {}), **_variables(args.env, environ)}
    options["handed_on"] = tuple(word for word in args.env if "=" not in word)
    options["given_ranks"] = options.get("ranks")
    hosts = options.get("hosts", ())
    options.setdefault("ranks", sum(host.slots for host in hosts) or 1)
    if args.scheduler not in NODE_CHOOSING and (error := slots_error(options["ranks"], hosts)):
        raise UsageError(error)
    return RunRequest(**{"words": (), **options})


def _from_file(path: Path, is_script: bool) -> dict[str, Any]:
    """Return the options of a job file, whose relative paths are relative to the working directory."""
    try:
        loading = importlib.import_module("dualdist.launch.job_file")
    except ModuleNotFoundError as error:
        raise UsageError(f"--config needs {error.name}: pip install 'dualdist[job]'") from error
    record = read_record()
    job = loading.load(path, is_script=is_script, horovod_has_mpi=None if record is None else record.mpi)
    optional = {
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
    found = {name: value for name, value in optional.items() if value is not None}
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

"""From a Job to its end: looks at the hosts, has every rank report, starts it, and starts it again where asked to."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from dualdist.launch import env_defaults, host_probe, rank, ssh
from dualdist.launch import hosts as host_check
from dualdist.launch.control_channel import CONTROL_VARIABLE
from dualdist.launch.execute import find_site
from dualdist.launch.job import Command, Job, RendezvousAddress, Site
from dualdist.launch.launchers import build_commands
from dualdist.launch.supervisor import ControlListener, JobOutcome, Supervisor
from dualdist.utils.exit_codes import REQUEUE
from dualdist.utils.redaction import redact_variables

LOOPBACK = "127.0.0.1"
ROUND = "DUALDIST_RUN_ROUND"
# Launchers that restart failed ranks themselves, on one host.
RESTARTING = ("torchrun",)


@dataclass(frozen=True)
class RunSettings:
    """How to run a job, whatever it is."""

    is_dry: bool = False
    stdout_to_stderr: bool = False  # so that what ranks print there goes to stderr
    timeout_s: float | None = None
    log_dir: str | None = None
    tag_output: bool = False


@dataclass(frozen=True)
class RunReport:
    """What was done; no outcome where nothing was started. `is_spread`: ranks were on several hosts."""

    launcher: str
    commands: tuple[Command, ...]
    is_spread: bool
    outcome: JobOutcome | None = None
    restarts: int = 0

    def to_json(self) -> str:
        known = {"launcher": self.launcher, "restarts": self.restarts, "commands": [asdict(c) for c in self.commands]}
        return json.dumps({**known, "outcome": None if self.outcome is None else asdict(self.outcome)}, indent=1)


@dataclass(frozen=True)
class _Plan:
    """All that the commands of each round are built from."""

    job: Job
    launcher: str
    site: Site
    settings: RunSettings
    environ: Mapping[str, str]
    is_spread: bool
    restarts: int
    back: tuple[str, ...]

    def in_round(self, attempt: int) -> _Plan:
        """The plan of a later round: ranks are told which, and those of this host meet at a port of their own."""
        if attempt == 0:
            return self
        site = self.site if self.job.hosts else replace(self.site, rendezvous=RendezvousAddress(LOOPBACK, _free_port()))
        return replace(self, site=site, job=replace(self.job, env={**self.job.env, ROUND: str(attempt)}))

    def commands(self, listener: ControlListener | None = None) -> tuple[Command, ...]:
        job, port = self.job, None
        if listener is not None:
            job = replace(job, env={**job.env, CONTROL_VARIABLE: listener.address.dumps()})
            port = listener.address.port
        return tuple(
            ssh.wrap_in_ssh(command, self.site, link_port=port)
            for command in build_commands(self.launcher, job, self.site)
        )

    def shown(self) -> tuple[Command, ...]:
        """The commands without the values of secrets, as people may see them."""
        site = replace(self.site, launcher_env=redact_variables(self.site.launcher_env))
        return replace(self, site=site, job=replace(self.job, env=redact_variables(self.job.env))).commands()


def run_job(job: Job, launcher: str, settings: RunSettings, environ: Mapping[str, str]) -> RunReport:
    """Run the job to its end on all its hosts; in a dry run only say what would run. LaunchError where it cannot be."""
    plan = _planned(job, launcher, settings, environ)
    if settings.is_dry:
        return RunReport(launcher, plan.shown(), plan.is_spread)
    with ExitStack() as stack:
        # Loopback comes last: on another host it is an ssh's forwarding, which does not tell when that host is cut off.
        is_local = _is_all_here(job, launcher)
        listener = ControlListener.open((LOOPBACK,) if is_local else (*plan.back, LOOPBACK), is_local=is_local)
        stack.callback(listener.close)
        return _rounds(plan, listener)


def _planned(job: Job, launcher: str, settings: RunSettings, environ: Mapping[str, str]) -> _Plan:
    """The job as it will run: with the variables that it needs, and its ranks wrapped."""
    site, here = replace(find_site(), secret_names=env_defaults.secret_names(environ)), host_probe.probe_host()
    site = replace(site, task_cpus=env_defaults.cpus_per_task(environ, job.ranks) if launcher == "srun" else None)
    back = tuple(here.networks().values())
    if _is_all_here(job, launcher):
        host_check.check_interface(here.hostname, here, job.interface)
    if job.hosts:
        forwarded = env_defaults.rank_variables(environ, job.env, threads_a_rank=None, interface=None, has_hosts=True)
        reached = host_check.check_hosts([host for host, _ in job.ranks_by_host()], job.interface, site, forwarded)
        job, back = replace(job, hosts=reached.hosts), reached.back
        needs = env_defaults.launcher_variables(environ)
        site = replace(site, rendezvous=reached.rendezvous, networks=reached.networks, launcher_env=needs)
        each = [
            env_defaults.threads_per_rank(cores, ranks)
            for cores, (_, ranks) in zip(reached.cores, job.ranks_by_host(), strict=True)
        ]
    else:
        site = replace(site, rendezvous=RendezvousAddress(LOOPBACK, _free_port()))
        each = [env_defaults.threads_per_rank(here.cores, job.ranks)]
    env = env_defaults.rank_variables(
        environ,
        job.env,
        threads_a_rank=site.task_cpus if launcher == "srun" else min(each),
        interface=job.interface,
        has_hosts=bool(job.hosts),
    )
    is_spread = env_defaults.is_spread(environ, launcher, has_hosts=bool(job.hosts))
    output = rank.RankSettings(job.program, settings.tag_output, is_spread, settings.log_dir)
    is_launchers = launcher in RESTARTING and not job.hosts
    inner, outer = (job.max_restarts, 0) if is_launchers else (0, job.max_restarts)
    if job.min_ranks is not None:
        inner = sys.maxsize  # a lost rank is the launcher's business
    job = replace(job, program=rank.rank_argv(output), env=env, max_restarts=inner)
    return _Plan(job, launcher, site, settings, environ, is_spread, outer, back)


def _rounds(plan: _Plan, listener: ControlListener) -> RunReport:
    """Start the job, and start it again after a failure as often as was asked for and the launcher does not itself."""
    began = time.monotonic()
    timeout_s, inner = plan.settings.timeout_s, plan.job.max_restarts
    for attempt in range(plan.restarts + 1):
        current = plan.in_round(attempt)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
        stdout = 2 if plan.settings.stdout_to_stderr else None
        outcome = Supervisor(current.commands(listener), listener, plan.environ, inner, stdout).run(left_s)
        if outcome.code == 0 or outcome.why or outcome.told or attempt == plan.restarts:
            break
        who = outcome.failure.who(has_hosts=plan.is_spread) if outcome.failure is not None else plan.launcher
        what = "a rank was told to stop" if outcome.code == REQUEUE else f"{who} failed"
        print(f"dualdist run: {what}; all ranks start anew, {attempt + 1} of {plan.restarts} times", file=sys.stderr)
    outcome = replace(outcome, seconds=time.monotonic() - began)
    return RunReport(plan.launcher, current.shown(), plan.is_spread, outcome, attempt)


def _is_all_here(job: Job, launcher: str) -> bool:
    """Whether no rank can be on another host: in an allocation MPI's launchers and srun go where they may."""
    return not job.hosts and launcher in ("python", "spawn", "torchrun", "horovodrun")


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as free:
        return int(free.getsockname()[1])

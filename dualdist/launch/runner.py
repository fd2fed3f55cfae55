"""Run a Job to its end: check its hosts, wrap its ranks, start it, and start it again after a failure if requested."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dualdist.environments.outer_job import outer_job_variables
from dualdist.launch import env_defaults, rank, ssh
from dualdist.launch.allocation import node_cores
from dualdist.launch.elastic_supervisor import ELASTIC_TIMEOUT_S, ElasticSupervisor
from dualdist.launch.execute import find_site
from dualdist.launch.host_discovery import HostDiscovery
from dualdist.launch.hosts import check_hosts, check_interface, is_local_host, probe_host
from dualdist.launch.job import Command, Host, Job, RendezvousAddress, Site
from dualdist.launch.launchers import LAUNCHERS, build_commands
from dualdist.launch.launchers.spawn import place_command
from dualdist.launch.run_request import RunRequest
from dualdist.launch.supervisor import JobOutcome, Supervisor, listen
from dualdist.rendezvous.exec_rendezvous import RUN_RENDEZVOUS
from dualdist.utils.control_channel import CONTROL_VARIABLE
from dualdist.utils.network_interfaces import format_endpoint
from dualdist.utils.redaction import is_secret, redact_command, redact_variables
from dualdist.utils.variables import REQUEUE

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RunReport:
    """The commands of a job, its outcome, None in a dry run, and whether ranks on several hosts took part."""

    launcher: str
    commands: tuple[Command, ...]
    outcome: JobOutcome | None = None
    restarts: int = 0
    is_multi_host: bool = False

    def to_json(self) -> str:
        fields = asdict(self)
        return json.dumps({name: fields[name] for name in ("launcher", "restarts", "commands", "outcome")}, indent=1)


def run_job(
    job: Job,
    launcher: str,
    request: RunRequest,
    environ: Mapping[str, str],
    *,
    is_dry: bool,
    is_verbose: bool,
    stdout: int | None,
    discovery: HostDiscovery | None = None,
) -> RunReport:
    """Run the job on all its hosts to its end, or build its commands in a dry run; LaunchError if it cannot start.

    `stdout` is the file that its output goes to, if that is not standard output. With `discovery`, whose hosts the job
    has, the hosts of an elastic job change.
    """
    # A job that a rank starts is not a part of the rank's job.
    outer = outer_job_variables(environ)
    job, site, addresses = _complete(job, launcher, request, {k: v for k, v in environ.items() if k not in outer})
    if is_dry:
        return RunReport(launcher, _redacted_commands(launcher, job, site, outer))
    # Loopback comes last: on another host ssh forwards it, which does not notice that the host is cut off.
    is_local = _is_single_host(job, launcher)
    server, address = listen((LOOPBACK,) if is_local else (*addresses, LOOPBACK), is_local=is_local)
    began, has_frames = time.monotonic(), LAUNCHERS[launcher].repeats_failures and not is_verbose
    own = {CONTROL_VARIABLE: address.dumps(), **({rank.FRAMES: "1"} if has_frames else {})}
    if discovery is not None:
        discovery.start()
    with server:
        for number in range(request.max_restarts + 1):
            if number:
                job = replace(job, env={**job.env, rank.RESTART: str(number)})
                # Restarted ranks on this host meet at another port.
                site = site if job.hosts else replace(site, rendezvous=_local_rendezvous())
            spent_s, limit_s = time.monotonic() - began, request.timeout
            left_s = None if limit_s is None else max(0.0, limit_s - spent_s)
            started = replace(job, env={**job.env, **own})
            commands = _commands(launcher, started, site, outer, address.port)
            running = (commands, server, address.token, environ, stdout)
            supervisor: Supervisor
            if job.min_ranks is not None and LAUNCHERS[launcher].elastic == "dualdist run":

                def make_command(place: int, host: Host, job: Job = started, site: Site = site) -> Command:
                    there = replace(host, is_local=is_local_host(host.name))
                    return _wrap(place_command(job, site, place, there), site, outer, address.port)

                supervisor = ElasticSupervisor(
                    *running,
                    min_ranks=job.min_ranks,
                    elastic_timeout_s=request.elastic_timeout or ELASTIC_TIMEOUT_S,
                    discovery=discovery,
                    make_command=make_command,
                    max_places=request.max_ranks or math.inf,
                    host_names=[host.name for host, count in job.ranks_by_host() for _ in range(count)],
                )
            else:
                supervisor = Supervisor(
                    *running, launcher_restarts_ranks=job.min_ranks is not None, has_frames=has_frames
                )
            outcome = supervisor.run(left_s)
            is_multi_host = bool(job.hosts) or len(supervisor.hosts) > 1
            if outcome.code == 0 or outcome.error or outcome.stop_signal or number == request.max_restarts:
                break
            failed = outcome.failure.label(has_hosts=is_multi_host) if outcome.failure is not None else launcher
            event = "a rank stopped on notice" if outcome.code == REQUEUE else f"{failed} failed"
            turns = f"{number + 1} of {request.max_restarts} times"
            print(f"dualdist run: {event}; restarting all ranks, {turns}", file=sys.stderr)
    outcome = replace(outcome, seconds=time.monotonic() - began)
    return RunReport(launcher, _redacted_commands(launcher, job, site, outer), outcome, number, is_multi_host)


def _complete(
    job: Job, launcher: str, request: RunRequest, environ: Mapping[str, str]
) -> tuple[Job, Site, tuple[str, ...]]:
    """Probe the hosts, add variables, and wrap the ranks; the addresses are where ranks reach `dualdist run`."""
    site, here = replace(find_site(), secret_names=tuple(filter(is_secret, environ))), probe_host()
    uses_task_cpus = LAUNCHERS[launcher].uses_task_cpus
    if uses_task_cpus:
        site = replace(site, task_cpus=env_defaults.cpus_per_task(environ, job.ranks))
    if _is_single_host(job, launcher):
        check_interface(here.hostname, here, job.interface)
    if job.uses_allocation and job.hosts:
        site = replace(site, node_cores=node_cores(environ))
    if job.hosts:
        forwarded = env_defaults.rank_variables(environ, job.env, threads=None, interface=None, has_hosts=True)
        reached = check_hosts([host for host, _ in job.ranks_by_host()], job.interface, site, forwarded)
        job, local_addresses = replace(job, hosts=reached.hosts), reached.local_addresses
        launcher_env = env_defaults.launcher_variables(environ)
        site = replace(site, rendezvous=reached.rendezvous, networks=reached.networks, launcher_env=launcher_env)
        layout = zip(reached.cores, (ranks for _, ranks in job.ranks_by_host()), strict=True)
        threads = min(env_defaults.threads_per_rank(cores, ranks) for cores, ranks in layout)
    else:
        local_addresses = tuple(here.networks().values())
        site = replace(site, rendezvous=_local_rendezvous())
        threads = env_defaults.threads_per_rank(here.cores, job.ranks)
    env = env_defaults.rank_variables(
        environ,
        job.env,
        threads=site.task_cpus if uses_task_cpus else threads,
        interface=job.interface,
        has_hosts=bool(job.hosts),
    )
    if job.hosts and LAUNCHERS[launcher].mpi == "always":
        main = site.require_rendezvous()
        env[RUN_RENDEZVOUS] = f"tcp://{format_endpoint(main.address, main.port)}"
    is_shown = os.isatty(2) and not request.tag_output and request.log_dir is None
    has_terminal = is_shown and not any(command.prefix for command in build_commands(launcher, job, site))
    program = rank.rank_argv(job.program, request.tag_output, request.log_dir, has_terminal)
    return replace(job, program=program, env=env), site, local_addresses


def _commands(
    launcher: str, job: Job, site: Site, unset: Sequence[str], control_port: int | None = None
) -> tuple[Command, ...]:
    return tuple(_wrap(command, site, unset, control_port) for command in build_commands(launcher, job, site))


def _wrap(command: Command, site: Site, unset: Sequence[str], control_port: int | None) -> Command:
    """Return the local command that runs the given one on its host, without the variables of an outer job."""
    wrapped = ssh.wrap_remote(command, site, control_port=control_port)
    return replace(wrapped, unset=(*wrapped.unset, *unset))


def _redacted_commands(launcher: str, job: Job, site: Site, unset: Sequence[str]) -> tuple[Command, ...]:
    """Return the commands without the values of secrets."""
    site = replace(site, launcher_env=redact_variables(site.launcher_env))
    job = replace(job, env=redact_variables(job.env), program=tuple(redact_command(job.program)))
    return _commands(launcher, job, site, unset)


def _is_single_host(job: Job, launcher: str) -> bool:
    """Return True if all ranks are on this host."""
    return not job.hosts and not LAUNCHERS[launcher].uses_allocation


def _local_rendezvous() -> RendezvousAddress:
    with socket.create_server((LOOPBACK, 0)) as free:
        return RendezvousAddress(LOOPBACK, free.getsockname()[1])

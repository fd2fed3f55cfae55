"""`dualdist run --scheduler`: its options, and the job script that is printed, written or submitted."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.cli.run_request import RunRequest
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.env_defaults import interface_variables
from dualdist.launch.job import EXCLUSIVE_RESOURCES, layout_error
from dualdist.launch.launchers import can_start_mpi, find_conflicts
from dualdist.launch.schedulers import SCHEDULERS, Scheduler, find_scheduler, job_script
from dualdist.launch.schedulers.request import ScriptRequest
from dualdist.utils.redaction import redact_variables


def build_script_request(
    scheduler: str,
    program: tuple[str, ...],
    *,
    launcher: str | None = None,
    ranks: int | None = None,
    hosts: Sequence[str] = (),
    resources: Mapping[str, Any] | None = None,
    backend: str | None = None,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    handed_on: Sequence[str] = (),
) -> ScriptRequest:
    """Return the ScriptRequest; `hosts` are names or name:slots, `resources` those of a job file."""
    given = {name: value for name, value in (resources or {}).items() if value is not None}
    if "partition" in given:
        given["queue"] = given.pop("partition")
    if hosts and scheduler != "ssh":
        raise UsageError(
            f"hosts {','.join(hosts)}: {scheduler} chooses the nodes itself; leave them out, and use --nodes"
        )
    names, slots = _hosts(hosts)
    nodes = given.pop("nodes", len(names) or 1)
    tasks = given.pop("tasks_per_node", slots)
    if tasks is None and ranks is None:
        tasks = given.get("gpus_per_node") or 1
    return ScriptRequest(
        program,
        _launcher(find_scheduler(scheduler), launcher, backend, transport),
        nodes=nodes,
        tasks_per_node=_tasks(tasks, ranks, nodes),
        hosts=names,
        setup=tuple(given.pop("setup", ())),
        backend=backend,
        transport=transport,
        env={name: value for name, value in (env or {}).items() if name not in handed_on},
        handed_on=tuple(handed_on),
        **given,
    )


def _launcher(scheduler: Scheduler, launcher: str | None, backend: str | None, transport: str | None) -> str:
    """Return the given launcher, else the scheduler's first one that starts MPI if the job needs it.

    Raise UsageError if options exclude each other; the Horovod of the job's nodes is unknown here.
    """
    needs_mpi = registry.needs_mpi(backend, transport)
    launcher = launcher or next(name for name in scheduler.launchers if can_start_mpi(name) or not needs_mpi)
    for _, message in find_conflicts(launcher, backend, transport, launchers=scheduler.launchers):
        raise UsageError(message)
    return launcher


def _tasks(tasks: int | None, ranks: int | None, nodes: int) -> int:
    """Return the ranks on each node."""
    if ranks is None or nodes < 1:
        return 1 if tasks is None else tasks
    if error := layout_error(ranks, nodes, tasks):
        raise UsageError(error)
    return ranks // nodes


def _hosts(hosts: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """Return the names of the hosts, and the number of slots of each."""
    pairs = [host.partition(":")[::2] for host in hosts]
    counts = {slots for _, slots in pairs}
    if len(counts) > 1 or any(slots and not slots.isdecimal() for slots in counts):
        raise UsageError(
            f"hosts {','.join(hosts)}: a script needs the same number of slots on each, as host1:4,host2:4"
        )
    slots = counts.pop() if counts else ""
    return tuple(name for name, _ in pairs), int(slots) if slots else None


TIMEOUT_S = 120.0
ELSEWHERE = "log in to a host of the cluster, or take the text there by --write FILE"


def submit_script(name: str, text: str) -> str:
    """Submit a script, and return what the scheduler printed; LaunchError if it refuses the job."""
    argv = find_scheduler(name).submit
    if argv is None:
        raise UsageError(f"--submit with the scheduler {name}: it has no queue; use --write FILE, and run that")
    if shutil.which(argv[0]) is None:
        raise LaunchError(f"{argv[0]} was not found on PATH: {ELSEWHERE}")
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shlex.join(argv)} failed: {error}") from error
    if done.returncode != 0:
        output = (done.stderr + done.stdout).strip() or "no output"
        raise LaunchError(f"{shlex.join(argv)} refused the job with exit code {done.returncode}: {output}")
    return done.stdout + done.stderr


# Keys of `resources:` in a job file, and names of options.
COUNTS = ("nodes", "tasks_per_node", "gpus_per_node", "gpus_per_task", "cpus_per_task", "requeue")
WORDS = ("memory", "memory_per_task", "time", "queue", "account", "container", "job_name", "setup")
SCHEDULER_OPTIONS = (*COUNTS, *WORDS, "write", "submit")
# Options without an effect in a script, and their attributes of a RunRequest.
RUN_ONLY_OPTIONS = {
    **{name: name for name in ("max_restarts", "min_ranks", "log_dir", "tag_output")},
    "timeout": "timeout_s",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of schedulers."""
    group = parser.add_argument_group("job scripts", "a job for a scheduler, instead of ranks on this host")
    add = group.add_argument
    add("--scheduler", metavar="NAME", help=f"print its job script: {', '.join(SCHEDULERS)}")
    add("--nodes", type=int, metavar="N", help="how many nodes (default: 1)")
    add("--tasks-per-node", type=int, metavar="N", help="ranks on each (default: one per GPU, else 1)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs that all ranks of a node see")
    add("--gpus-per-task", type=int, metavar="N", help="GPUs that one rank alone sees")
    add("--cpus-per-task", type=int, metavar="N", help="cores of a rank, and its threads (default: 1)")
    add("--memory", metavar="SIZE", help="of one node, as 64G")
    add("--memory-per-task", metavar="SIZE", help="of one rank, as 8G")
    add("--time", metavar="[D-]H:MM:SS", help="the time limit")
    add("--requeue", type=int, metavar="S", help="stop the job S seconds before the time limit, and queue it again")
    add("--partition", "--queue", dest="queue", metavar="NAME", help="the partition or queue")
    add("--account", metavar="NAME", help="the account that is charged")
    add("--container", metavar="IMAGE", help="an image for Apptainer or Kubernetes")
    add("--setup", action="append", metavar="LINE", help="a line of shell before the job; may be repeated")
    add("--job-name", metavar="NAME", help="default: the program's name")
    add("--write", metavar="FILE", help="write the script instead of printing it")
    add("--submit", action="store_true", default=None, help="submit it by sbatch, qsub, bsub or kubectl")


def reject_scheduler_options(args: argparse.Namespace) -> None:
    """Raise UsageError for an option of this group without --scheduler."""
    stray = [name for name in SCHEDULER_OPTIONS if getattr(args, name) is not None]
    if stray:
        raise UsageError(f"--{stray[0].replace('_', '-')} is an option of job scripts: add --scheduler NAME")


def run(args: argparse.Namespace, request: RunRequest, program: Sequence[str]) -> int:
    """Print, write or submit the script of a job."""
    ignored, hosts, ranks = _ignored_options(args, request), request.hosts, request.given_ranks
    if args.scheduler == "workstation" and not request.without_local_hosts().hosts:  # its slots give its ranks
        hosts, ranks = (), request.ranks if hosts else ranks
    if hosts and args.scheduler != "ssh" and args.hosts is None and args.hostfile is None:
        ignored, hosts = [*ignored, "hosts"], ()
    if ignored:
        print(f"dualdist run: {args.scheduler} scripts ignore: {', '.join(ignored)}", file=sys.stderr)
    script_request = build_script_request(
        args.scheduler,
        tuple(program),
        launcher=request.launcher,
        ranks=ranks,
        hosts=[str(host) for host in hosts],
        resources=_merge_resources(args, request.resources),
        backend=request.backend,
        transport=request.transport,
        env={**interface_variables(request.interface), **request.env},
        handed_on=request.handed_on,
    )
    redacted = replace(script_request, env=redact_variables(script_request.env))
    text = job_script(args.scheduler, redacted if args.dry_run else script_request)
    if args.write is not None and not args.dry_run:
        _write(Path(args.write), text)
        if not args.submit:
            print(f"dualdist run: wrote {args.write}; {_next_step(args, text)}", file=sys.stderr)
    if args.submit and not args.dry_run:
        sys.stdout.write(submit_script(args.scheduler, text))
    elif args.write is None or args.dry_run:
        sys.stdout.write(text)
    return 0


def _next_step(args: argparse.Namespace, text: str) -> str:
    """Return how to start the script that was written."""
    taker = SCHEDULERS[args.scheduler].submit
    start = f"{shlex.join(taker)} < {shlex.quote(args.write)}" if taker else f"bash {shlex.quote(args.write)}"
    has_setup = "\nsetup() {" in text
    return ("check that its setup() loads what a node needs, then " if has_setup else "next: ") + start


def _ignored_options(args: argparse.Namespace, request: RunRequest) -> list[str]:
    """Return the options of the job file that a script ignores; UsageError for one on the command line."""
    for name in (*RUN_ONLY_OPTIONS, "json"):
        if getattr(args, name):
            raise UsageError(
                f"--{name.replace('_', '-')}: only for ranks that dualdist run starts itself; "
                "leave it out with --scheduler"
            )
    return [name for name, attribute in RUN_ONLY_OPTIONS.items() if getattr(request, attribute)]


def _merge_resources(args: argparse.Namespace, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of the job file, overridden by options."""
    given = dict(resources)
    for rivals in EXCLUSIVE_RESOURCES:
        if any(getattr(args, name, None) is not None for name in rivals):
            given = {name: value for name, value in given.items() if name not in rivals}
    return given | {name: getattr(args, name) for name in (*COUNTS, *WORDS) if getattr(args, name) is not None}


def _write(path: Path, text: str) -> None:
    """Write a file, unless it exists with another text, which a person may have changed."""
    try:
        if path.exists() and path.read_text() != text:
            raise UsageError(f"{path} exists with another text: remove it, or write to another file")
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"--write {path}: {error.strerror}") from error

"""`dualdist run --scheduler`: the options that describe a job to a scheduler, its script written or submitted."""

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

from dualdist.cli.run_request import RunRequest
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.env_defaults import interface_variables
from dualdist.launch.job import EXCLUSIVE_RESOURCES, LAUNCHERS_WITHOUT_MPI, JobChoices, find_conflicts, layout_error
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
    """The ScriptRequest; `hosts` are names, or host:slots, and `resources` what a job file says under that key."""
    asked = {name: value for name, value in (resources or {}).items() if value is not None}
    if "partition" in asked:
        asked["queue"] = asked.pop("partition")
    if hosts and scheduler != "ssh":
        raise UsageError(
            f"hosts {','.join(hosts)}: {scheduler} chooses the nodes itself; leave them out, --nodes says how many"
        )
    names, slots = _hosts(hosts)
    nodes = asked.pop("nodes", len(names) or 1)
    tasks = asked.pop("tasks_per_node", slots)
    if tasks is None and ranks is None:
        tasks = asked.get("gpus_per_node") or 1
    return ScriptRequest(
        program,
        _launcher(find_scheduler(scheduler), JobChoices(launcher, backend, transport)),
        nodes=nodes,
        tasks_per_node=_tasks(tasks, ranks, nodes),
        hosts=names,
        setup=tuple(asked.pop("setup", ())),
        backend=backend,
        transport=transport,
        env={name: value for name, value in (env or {}).items() if name not in handed_on},
        handed_on=tuple(handed_on),
        **asked,
    )


def _launcher(scheduler: Scheduler, choice: JobChoices) -> str:
    """The one that was named, else the scheduler's first that starts what the job needs.

    UsageError where what was asked for cannot go together; which Horovod the job will find is not known here.
    """
    starts_mpi = [name for name in scheduler.launchers if name not in LAUNCHERS_WITHOUT_MPI]
    wants_mpi = "mpi" in (choice.backend, choice.transport)
    launcher = choice.launcher or (starts_mpi if wants_mpi else scheduler.launchers)[0]
    instead = f"choose {' or '.join(starts_mpi)}"
    for found in find_conflicts(replace(choice, launcher=launcher), horovod_has_mpi=None, instead=instead):
        raise UsageError(found.message)
    return launcher


def _tasks(tasks: int | None, ranks: int | None, nodes: int) -> int:
    """Ranks on each node: as said, or as the number of all ranks gives them."""
    if ranks is None or nodes < 1:
        return 1 if tasks is None else tasks
    if why := layout_error(ranks, nodes, tasks):
        raise UsageError(why)
    return ranks // nodes


def _hosts(hosts: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """The names of the hosts, and the slots that each has."""
    pairs = [host.partition(":")[::2] for host in hosts]
    counts = {slots for _, slots in pairs}
    if len(counts) > 1 or any(slots and not slots.isdecimal() for slots in counts):
        raise UsageError(
            f"hosts {','.join(hosts)}: a script wants the same number of slots on each, as host1:4,host2:4"
        )
    slots = counts.pop() if counts else ""
    return tuple(name for name, _ in pairs), int(slots) if slots else None


TIMEOUT_S = 120.0
ELSEWHERE = "log in to a host of the cluster, or take the text there by --write FILE"


def submit_script(name: str, text: str) -> str:
    """What the scheduler printed when it took the job; LaunchError where it refused."""
    argv = find_scheduler(name).submit
    if argv is None:
        raise UsageError(f"--submit with the scheduler {name}: there is none to submit to; --write FILE, and run that")
    if shutil.which(argv[0]) is None:
        raise LaunchError(f"{argv[0]} was not found on PATH: {ELSEWHERE}")
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shlex.join(argv)} took no job: {error}") from error
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip() or "nothing"
        raise LaunchError(f"{shlex.join(argv)} refused the job with exit code {done.returncode}, and said: {said}")
    return done.stdout + done.stderr


# Words of `resources:` in a job file, which are the options' names too.
COUNTS = ("nodes", "tasks_per_node", "gpus_per_node", "gpus_per_task", "cpus_per_task", "requeue")
WORDS = ("memory", "memory_per_task", "time", "queue", "account", "container", "job_name", "setup")
SCHEDULER_OPTIONS = (*COUNTS, *WORDS, "write", "submit")
# What only `dualdist run` itself can do for ranks: as options and job files call it, and as a RunRequest does.
RUN_ONLY_OPTIONS = {
    **{name: name for name in ("max_restarts", "min_ranks", "log_dir", "tag_output")},
    "timeout": "timeout_s",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of a scheduler, in a group of their own."""
    group = parser.add_argument_group("job scripts", "a job for a scheduler, instead of ranks on this host")
    add = group.add_argument
    add("--scheduler", metavar="NAME", help=f"print its job script: {', '.join(SCHEDULERS)}")
    add("--nodes", type=int, metavar="N", help="how many nodes (default: 1)")
    add("--tasks-per-node", type=int, metavar="N", help="ranks on each (default: one a GPU, else 1)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs that all ranks of a node see")
    add("--gpus-per-task", type=int, metavar="N", help="GPUs that one rank alone sees")
    add("--cpus-per-task", type=int, metavar="N", help="cores of a rank, and its threads (default: 1)")
    add("--memory", metavar="SIZE", help="of one node, as 64G")
    add("--memory-per-task", metavar="SIZE", help="of one rank, as 8G")
    add("--time", metavar="[D-]H:MM:SS", help="after which the scheduler ends the job")
    add("--requeue", type=int, metavar="S", help="tell it to stop S seconds before, and queue it again when it has")
    add("--partition", "--queue", dest="queue", metavar="NAME", help="where the job waits")
    add("--account", metavar="NAME", help="who pays")
    add("--container", metavar="IMAGE", help="for Apptainer, or Kubernetes' own")
    add("--setup", action="append", metavar="LINE", help="a line of shell before the job; again for more")
    add("--job-name", metavar="NAME", help="default: as the program is called")
    add("--write", metavar="FILE", help="write the script instead of printing it")
    add("--submit", action="store_true", default=None, help="hand it to sbatch, qsub, bsub or kubectl")


def reject_scheduler_options(args: argparse.Namespace) -> None:
    """UsageError where an option of this group was given without --scheduler, and would be passed over."""
    stray = [name for name in SCHEDULER_OPTIONS if getattr(args, name) is not None]
    if stray:
        raise UsageError(f"--{stray[0].replace('_', '-')} describes a job to a scheduler: add --scheduler NAME")


def run(args: argparse.Namespace, request: RunRequest, program: Sequence[str]) -> int:
    """Print, write or submit the script of a job. Options go before what the job file says under `resources`."""
    passed_over, hosts, ranks = _passed_over(args, request), request.hosts, request.ranks_asked
    if args.scheduler == "workstation" and not request.here().hosts:  # where its own names say how many ranks it takes
        hosts, ranks = (), request.ranks if hosts else ranks
    if hosts and args.scheduler != "ssh" and args.hosts is None and args.hostfile is None:
        passed_over, hosts = [*passed_over, "hosts"], ()
    if passed_over:
        print(f"dualdist run: a script for {args.scheduler} passes over {', '.join(passed_over)}", file=sys.stderr)
    asked = build_script_request(
        args.scheduler,
        tuple(program),
        launcher=request.launcher,
        ranks=ranks,
        hosts=[str(host) for host in hosts],
        resources=_asked(args, request.resources),
        backend=request.backend,
        transport=request.transport,
        env={**interface_variables(request.interface), **request.env},
        handed_on=request.handed_on,
    )
    text = job_script(args.scheduler, replace(asked, env=redact_variables(asked.env)) if args.dry_run else asked)
    if args.write is not None and not args.dry_run:
        _write(Path(args.write), text)
        if not args.submit:
            print(f"dualdist run: wrote {args.write}; {_next(args, text)}", file=sys.stderr)
    if args.submit and not args.dry_run:
        sys.stdout.write(submit_script(args.scheduler, text))
    elif args.write is None or args.dry_run:
        sys.stdout.write(text)
    return 0


def _next(args: argparse.Namespace, text: str) -> str:
    """What to do with the script that was written."""
    taker = SCHEDULERS[args.scheduler].submit
    start = f"{shlex.join(taker)} < {shlex.quote(args.write)}" if taker else f"bash {shlex.quote(args.write)}"
    has_setup = "\nsetup() {" in text
    return ("see that its setup() loads what a node needs, then " if has_setup else "next: ") + start


def _passed_over(args: argparse.Namespace, request: RunRequest) -> list[str]:
    """What the job file says, and a script cannot do; UsageError where an option asks for it."""
    for name in (*RUN_ONLY_OPTIONS, "json"):
        if getattr(args, name):
            raise UsageError(
                f"--{name.replace('_', '-')}: only ranks that dualdist run starts itself have that; "
                "leave it out with --scheduler"
            )
    return [name for name, attribute in RUN_ONLY_OPTIONS.items() if getattr(request, attribute)]


def _asked(args: argparse.Namespace, resources: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for: by options, else by the job file."""
    given = dict(resources)
    for rivals in EXCLUSIVE_RESOURCES:
        if any(getattr(args, name, None) is not None for name in rivals):
            given = {name: value for name, value in given.items() if name not in rivals}
    return given | {name: getattr(args, name) for name in (*COUNTS, *WORDS) if getattr(args, name) is not None}


def _write(path: Path, text: str) -> None:
    """The file says the text. One that a person has changed is left alone."""
    try:
        if path.exists() and path.read_text() != text:
            raise UsageError(f"{path} is there and says something else: remove it, or write to another file")
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"--write {path}: {error.strerror}") from error

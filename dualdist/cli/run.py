"""`dualdist run`: run a program on several ranks by a launcher, or write a job script for a scheduler."""

import argparse
import importlib
import math
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.cli.help_formatter import set_completions
from dualdist.errors import UsageError
from dualdist.horovod_build.record import read_record
from dualdist.launch.allocation import elastic_hosts, node_cores
from dualdist.launch.elastic_supervisor import ELASTIC_TIMEOUT_S
from dualdist.launch.env_defaults import allocated_tasks, default_launcher, rank_variables
from dualdist.launch.exec_env import check_torch_backend
from dualdist.launch.execute import find_site
from dualdist.launch.failure import describe_failure
from dualdist.launch.host_discovery import HostDiscovery
from dualdist.launch.hosts import check_hosts, read_hostfile
from dualdist.launch.job import VARIABLE_NAME, Command, Host, Job, slots_error
from dualdist.launch.launchers import ALL, DEFAULT_LAUNCHER, LAUNCHERS, find_conflicts
from dualdist.launch.launchers.spawn import SPAWN
from dualdist.launch.option import add_options, given_options, options_of
from dualdist.launch.processes import termination_raises
from dualdist.launch.run_request import RunRequest
from dualdist.launch.runner import RunReport, run_job
from dualdist.launch.schedulers import SCHEDULERS, build_script_request, find_scheduler, job_script, submit_script
from dualdist.launch.script_request import EXCLUSIVE_RESOURCES, Resources
from dualdist.utils.output_file import check_writable, write_json
from dualdist.utils.redaction import redact_command, redact_variables
from dualdist.utils.variables import REQUEUE, TORCH_BACKEND

EXAMPLES = (
    "dualdist run -np 2 train.py",
    "dualdist run -np 4 --launcher mpirun --backend mpi train.py --epochs 3",
    "dualdist run -H hosta:2,hostb:2 --tag-output train.py",
    "dualdist run --config job.yaml --scheduler slurm --write job.sh",
)
# The options of --help, and shorter texts for some.
COMMON = {
    "ranks": "number of ranks (default: as hosts or Slurm say, or 1)",
    "launcher": "torchrun, horovodrun, mpirun, srun, spawn, ...",
    "backend": "native, horovod, mpi or auto",
    "hosts": "",
    "config": "",
    "env": "a variable of every rank; may be repeated",
    "tag_output": "begin each line with its rank",
    "timeout": "end the job after S seconds",
    "scheduler": "print a job script: slurm, pbs, lsf, kubernetes, ...",
    "dry_run": "",
    "json": "write how the job went",
}
# Options, and their dests, that are taken for one of ours also after the program.
LATE = {**dict.fromkeys(("-np", "--np", "--nproc-per-node", "--nproc_per_node"), "ranks"), "--launcher": "launcher"}
# Only `dualdist run --min-ranks` itself takes these.
ELASTIC_OPTIONS = ("elastic_timeout", "max_ranks", "host_discovery_script")
# Schedulers that choose the nodes, so that the hosts of a job file do not limit the ranks.
NODE_CHOOSING = [name for name, scheduler in SCHEDULERS.items() if scheduler.submit is not None]


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "dualdist run [option ...] [-m] program [argument ...]"
    add_options(add, RunRequest)
    add("--config", metavar="JOB.yaml", help="a job file; options take precedence over it")
    add(
        "--env",
        action="append",
        default=[],
        metavar="K[=V]",
        help="a variable of every rank, by default with this shell's value; may be repeated",
    )
    add("--verbose", action="store_true", help="say how a default was chosen, and all that the launcher says")
    add("--dry-run", action="store_true", help="print what would run and start nothing; hosts are probed")
    add("--json", metavar="FILE", help="write how the job went to FILE, or to standard output for -")
    add("-m", dest="is_module", action="store_true", help="the program is a module, as for python -m")
    group = parser.add_argument_group("job scripts", "a job for a scheduler, instead of ranks on this host")
    group.add_argument("--scheduler", metavar="NAME", help=f"print its job script: {', '.join(SCHEDULERS)}")
    add_options(group.add_argument, Resources)
    group.add_argument("--write", metavar="FILE", help="write the script instead of printing it")
    group.add_argument("--submit", action="store_true", help="submit it by sbatch, qsub, bsub or kubectl")
    add("words", metavar="program", nargs=argparse.REMAINDER, help="a script or module, and its arguments")
    parser.epilog = "Exit code: that of the first failed rank; 128 + N for signal N; 75 if preempted."
    completions = {"backend": registry.choices(), "transport": registry.transports()}
    set_completions(parser, {"launcher": tuple(LAUNCHERS), "scheduler": tuple(SCHEDULERS), **completions})


def parse_run_request(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[RunRequest, Mapping[str, str]]:
    """Return the request of a command line and its job file, and the places in the file of the options it gives."""
    from_file, places = _load_job_file(args.config)
    words = tuple(args.words[1:] if args.words[:1] == ["--"] else args.words)
    names = (word.partition("=")[0] for word in words[1:])
    late = [name for name in names if name in LATE and getattr(args, LATE[name]) is None]
    if late:
        print(f"dualdist run: {late[0]} goes to {words[0]}: options of dualdist run stand before it", file=sys.stderr)
    given = given_options(RunRequest, args)
    if words:
        given |= {"program": None, "module": None, "args": words[1:]}
        given["module" if args.is_module else "program"] = words[0]
    elif args.is_module:
        raise UsageError("-m names no module: expected dualdist run [option ...] -m module")
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("-H and --hostfile both say where to run: give one of them")
    if args.hosts is not None or args.hostfile is not None:
        given = {"hosts": (), "hostfile": None} | given
    options = {**from_file, **given}
    if options.get("hostfile") is not None:
        options["hosts"] = read_hostfile(Path(options["hostfile"]))
    name = options.get("torch_backend")
    chosen = {} if name is None else {TORCH_BACKEND: name}
    options["env"] = {**options.get("env", {}), **chosen, **_variables(args.env, environ)}
    check_torch_backend({**environ, **options["env"]})
    request = RunRequest(**options)
    if args.scheduler not in NODE_CHOOSING and (error := slots_error(request.default_ranks, request.hosts)):
        raise UsageError(error)
    return request, {name: place for name, place in places.items() if name not in given}


def _load_job_file(path: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of the job file, if any, and their places; paths in it are relative to the working folder."""
    if path is None:
        return {}, {}
    try:
        job_file = importlib.import_module("dualdist.launch.job_file")
    except ModuleNotFoundError as error:
        raise UsageError(f"--config needs {error.name}: pip install 'dualdist[job]'") from error
    values, places = job_file.load(Path(path))
    return values, places


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


def run(args: argparse.Namespace) -> int:
    """Run the job to its end, or print its command line or job script; return its exit code."""
    request, places = parse_run_request(args, os.environ)
    if args.scheduler is not None:
        return _schedule(args, request)
    program = request.python_words(is_local=True)
    for name in (*given_options(Resources, args), *(name for name in ("write", "submit") if getattr(args, name))):
        raise UsageError(f"--{name.replace('_', '-')} is an option of job scripts: add --scheduler NAME")
    check_writable("--json", args.json)
    _check_elastic(request)
    hosts = request.other_hosts
    launcher, ranks = _resolve(request, has_hosts=bool(hosts), is_verbose=args.verbose)
    for setting, message in find_conflicts(
        launcher,
        request.backend,
        request.transport,
        ranks=ranks,
        has_hosts=bool(hosts),
        min_ranks=request.min_ranks,
        elastic=[name for name in ELASTIC_OPTIONS if getattr(request, name) is not None],
        horovod_has_mpi=getattr(read_record(), "mpi", None),
    ):
        raise UsageError(places.get(setting, "") + message)
    discovery, is_elastic = None, request.min_ranks is not None and launcher == SPAWN.name
    if is_elastic:
        hosts, ranks, discovery = _place_elastic(request, hosts, ranks, is_dry=args.dry_run)
    if discovery is not None and ranks < (request.min_ranks or 1):
        few = f"found {ranks} slots in time, of at least {request.min_ranks} (--min-ranks): start the job again"
        print(f"dualdist run: {request.host_discovery_script} {few}", file=sys.stderr)
        return REQUEUE
    job = Job(
        program,
        ranks,
        request.backend,
        request.transport,
        env=request.env,
        hosts=hosts,
        nodes=None,
        interface=request.network_interface,
        min_ranks=request.min_ranks,
        uses_allocation=is_elastic and not request.hosts,
    )
    stdout = 2 if args.json == "-" else None
    with termination_raises():
        report = run_job(
            job,
            launcher,
            request,
            os.environ,
            is_dry=args.dry_run,
            is_verbose=args.verbose,
            stdout=stdout,
            discovery=discovery,
        )
    if args.dry_run:
        print("\n".join(shell_lines(report.commands)))
    elif report.outcome is not None:
        report_failure(report)
    write_json(args.json, report.to_json())
    return 0 if report.outcome is None else report.outcome.code


def _check_elastic(request: RunRequest) -> None:
    """Raise UsageError if options of an elastic job contradict each other."""
    if request.max_ranks is not None and request.ranks is not None:
        raise UsageError("-np and --max-ranks both say how many ranks run at most: give one of them")
    if request.max_ranks is not None and request.max_ranks < (request.min_ranks or 1):
        raise UsageError(f"--max-ranks {request.max_ranks}: expected --min-ranks ({request.min_ranks}) or more")
    if request.host_discovery_script is not None and (request.hosts or request.ranks is not None):
        raise UsageError("--host-discovery-script says where to run, and on how many slots: leave out -np and hosts")


def _place_elastic(
    request: RunRequest, hosts: tuple[Host, ...], ranks: int, *, is_dry: bool
) -> tuple[tuple[Host, ...], int, HostDiscovery | None]:
    """Return the hosts of an elastic job, its ranks, and what finds its hosts, None without a script.

    Without hosts in the request they are those of this allocation.
    """
    discovery = None
    if request.host_discovery_script is not None:
        site = replace(find_site(), node_cores=node_cores(os.environ))
        env = rank_variables(os.environ, request.env, threads=None, interface=None, has_hosts=True)
        discovery = HostDiscovery(
            request.host_discovery_script, lambda host: check_hosts([host], request.network_interface, site, env)
        )
        wait_s = min(request.elastic_timeout or ELASTIC_TIMEOUT_S, request.timeout or math.inf)
        with termination_raises():
            discovery.wait_for(request.min_ranks or 1, 0.0 if is_dry else wait_s)
        hosts, ranks = discovery.hosts, sum(host.slots for host in discovery.hosts)
    elif not request.hosts:
        hosts, tasks = elastic_hosts(request.ranks, os.environ)
        ranks = tasks or ranks
    return hosts, min(ranks, request.max_ranks or ranks), discovery


def _resolve(request: RunRequest, *, has_hosts: bool, is_verbose: bool) -> tuple[str, int]:
    """Return the launcher and the number of ranks; report defaults on stderr, the usual one if `is_verbose`."""
    launcher, reason = request.launcher, "no -np was given"
    if launcher is None:
        launcher, reason = default_launcher(
            {**os.environ, **request.env},
            request.backend,
            request.transport,
            has_hosts=has_hosts,
            is_elastic=request.min_ranks is not None,
        )
    is_open = ALL[launcher].uses_allocation and request.ranks is None and not request.hosts
    ranks, source = (allocated_tasks(os.environ) if is_open else None) or (request.default_ranks, "")
    is_usual = launcher == DEFAULT_LAUNCHER and not source
    if (request.launcher is None or source) and (is_verbose or not is_usual):
        is_known = request.min_ranks is None or request.ranks or request.hosts  # else hosts are found, or allocated
        started = (f"{ranks} rank(s)" if is_known else "the ranks") + (f" ({source}={ranks})" if source else "")
        print(f"dualdist run: {launcher} starts {started}, as {reason}", file=sys.stderr)
    return launcher, ranks


def _schedule(args: argparse.Namespace, request: RunRequest) -> int:
    """Print, write or submit the script of a job."""
    run_only = [name for name, spec in options_of(RunRequest).items() if spec.is_run_only]
    for name in (*run_only, "json"):
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: only for ranks that dualdist run starts itself; leave it out with --scheduler")
    ignored = [name for name in run_only if getattr(request, name)]
    scheduler = find_scheduler(args.scheduler)
    if args.scheduler == "workstation" and not request.other_hosts:  # its slots give its ranks
        request = replace(request, hosts=(), ranks=request.default_ranks if request.hosts else request.ranks)
    if request.hosts and not scheduler.takes_hosts and args.hosts is None and args.hostfile is None:
        request, ignored = replace(request, hosts=()), [*ignored, "hosts"]
    if ignored:
        print(f"dualdist run: {args.scheduler} scripts ignore: {', '.join(ignored)}", file=sys.stderr)
    request = replace(request, resources=_merge_resources(args, request.resources))
    handed_on = [word for word in args.env if "=" not in word]
    script_request = build_script_request(args.scheduler, request, handed_on)
    shown = tuple(redact_command(script_request.program))
    redacted = replace(script_request, env=redact_variables(script_request.env), program=shown)
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


def _merge_resources(args: argparse.Namespace, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of the job file, overridden by options."""
    options = given_options(Resources, args)
    overridden = {name for rivals in EXCLUSIVE_RESOURCES if not options.keys().isdisjoint(rivals) for name in rivals}
    return {name: value for name, value in resources.items() if name not in overridden} | options


def _next_step(args: argparse.Namespace, text: str) -> str:
    """Return how to start the script that was written."""
    taker = SCHEDULERS[args.scheduler].submit
    start = f"{shlex.join(taker)} < {shlex.quote(args.write)}" if taker else f"bash {shlex.quote(args.write)}"
    has_setup = "\nsetup() {" in text
    return ("check that its setup() loads what a node needs, then " if has_setup else "next: ") + start


def _write(path: Path, text: str) -> None:
    """Write a file, unless it exists with another text, which a person may have changed."""
    try:
        if path.exists() and path.read_text() != text:
            raise UsageError(f"{path} exists with another text: remove it, or write to another file")
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"--write {path}: {error.strerror}") from error


def report_failure(report: RunReport) -> None:
    """Print why a job failed, or that it was stopped."""
    outcome = report.outcome
    assert outcome is not None
    if outcome.error:
        message = outcome.error
    elif outcome.code == REQUEUE:
        message = "the job stopped as requested, or had too few ranks; start it again to resume it"
    elif outcome.stop_signal and outcome.code:
        message = f"the job was ended by {signal.Signals(outcome.stop_signal).name}"
    elif outcome.failure is not None:
        message = describe_failure(outcome.failure, has_hosts=report.is_multi_host)
    elif outcome.code:
        message = f"{report.launcher} ended with exit code {outcome.code}; no rank reported a failure"
    else:
        return
    print(f"dualdist run: {message}", file=sys.stderr)


def shell_line(built: Command) -> str:
    """Return the command with its variables and standard input, as one would type it in a shell."""
    changes = ["-i"] if built.has_clean_env else [f"--unset={name}" for name in built.unset]
    changes += [f"{name}={value}" for name, value in built.env.items()]
    typed = shlex.join([*(["env", *changes] if changes else []), *built.argv])
    return f"{shlex.join(['echo', built.stdin])} | {typed}" if built.stdin else typed


def shell_lines(commands: Sequence[Command]) -> list[str]:
    """Return the commands of a job, for a shell that runs them concurrently."""
    if len(commands) == 1:
        return [shell_line(commands[0])]
    return [*(f"{shell_line(command)} &" for command in commands), "wait"]

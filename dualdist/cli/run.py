"""`dualdist run`: run a program on several ranks by a launcher, or write a job script for a scheduler."""

import argparse
import importlib
import math
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dualdist.backends import registry
from dualdist.cli.help_formatter import set_completions
from dualdist.errors import UsageError
from dualdist.horovod_build.record import read_record
from dualdist.launch.env_defaults import allocated_tasks, default_launcher, interface_variables
from dualdist.launch.failure import describe_failure
from dualdist.launch.hosts import is_local_host, parse_hosts, read_hostfile
from dualdist.launch.job import EXCLUSIVE_RESOURCES, VARIABLE_NAME, Command, Host, Job, slots_error
from dualdist.launch.launchers import ALL, LAUNCHERS, find_conflicts
from dualdist.launch.processes import termination_raises
from dualdist.launch.runner import RunReport, RunSettings, run_job
from dualdist.launch.schedulers import SCHEDULERS, build_script_request, job_script, submit_script
from dualdist.utils.output_file import check_writable, write_json
from dualdist.utils.redaction import redact_command, redact_variables
from dualdist.utils.suggest import require_choice
from dualdist.utils.variables import REQUEUE

HVD_MODULE = ("-m", "dualdist.hvd")
EXAMPLES = (
    "dualdist run -np 2 train.py",
    "dualdist run -np 4 --launcher mpirun --backend mpi train.py --epochs 3",
    "dualdist run -H hosta:2,hostb:2 --tag-output train.py",
    "dualdist run --config job.yaml --scheduler slurm --write job.sh",
)
COMMON = {
    "ranks": "how many ranks (default: as hosts or Slurm say, or 1)",
    "launcher": "torchrun, horovodrun, mpirun, srun, spawn, ...",
    "backend": "native, horovod, mpi or auto",
    "hosts": "hosts, reached by ssh, and how many ranks each takes",
    "config": "a job file; options take precedence over it",
    "env": "a variable of every rank; may be repeated",
    "tag_output": "begin each line with its rank",
    "timeout": "end the job after so many seconds",
    "scheduler": "print a job script: slurm, pbs, lsf, kubernetes, ...",
    "dry_run": "print what would run and start nothing",
    "json": "write how the job went",
}
# Options, and their dests, that are taken for one of ours also after the program.
LATE = {**dict.fromkeys(("-np", "--np", "--nproc-per-node", "--nproc_per_node"), "ranks"), "--launcher": "launcher"}
# Keys of a job file and dests of options that have the same values.
RUN_OPTIONS = (
    *("launcher", "backend", "transport", "ranks", "min_ranks", "network_interface", "max_restarts", "timeout"),
    *("log_dir", "tag_output", "as_horovod", "hosts", "hostfile"),
)
# Those that a script ignores.
RUN_ONLY_OPTIONS = ("max_restarts", "min_ranks", "log_dir", "tag_output", "timeout")
# Those of a job file's `resources:`.
RESOURCES = (
    *("nodes", "tasks_per_node", "gpus_per_node", "gpus_per_task", "cpus_per_task", "requeue"),
    *("memory", "memory_per_task", "time", "queue", "account", "container", "kubeflow", "job_name", "setup"),
)
# Schedulers that choose the nodes, so that the hosts of a job file do not limit the ranks.
NODE_CHOOSING = [name for name, scheduler in SCHEDULERS.items() if scheduler.submit is not None]


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "dualdist run [option ...] [-m] program [argument ...]"
    add(
        "-np",
        "--ranks",
        type=int,
        metavar="N",
        help="how many ranks (default: one per slot of the hosts, or task of a Slurm allocation, else 1)",
    )
    add(
        "--launcher",
        metavar="NAME",
        help=f"what starts them: {', '.join(LAUNCHERS)} (default: mpirun for the backend mpi, srun in a Slurm "
        "allocation, the backend's own if hosts are given, else torchrun)",
    )
    add(
        "--backend",
        choices=registry.choices(),
        metavar="NAME",
        help="native, horovod, mpi or auto (default: DUALDIST_BACKEND, else auto, or native with --as-horovod)",
    )
    add(
        "--transport",
        choices=registry.transports(),
        help="the transport of the backend (default: DUALDIST_TRANSPORT, else auto)",
    )
    where = parser.add_argument_group("hosts").add_argument
    where("-H", "--hosts", metavar="A:2,B:2", help="hosts, reached by ssh, and how many ranks each takes")
    where("--hostfile", metavar="FILE", help="a file of hosts, with `a slots=2` or `a:2` on each line")
    where("--network-interface", metavar="IF", help="the interface by which the hosts reach each other")
    add("--config", metavar="JOB.yaml", help="a job file; options take precedence over it")
    add(
        "--env",
        action="append",
        default=[],
        metavar="K[=V]",
        help="a variable of every rank, by default with this shell's value; may be repeated",
    )
    add("--max-restarts", type=int, metavar="N", help="restart all ranks after a failure (default: 0 times)")
    add(
        "--min-ranks",
        type=int,
        metavar="N",
        help="continue with so few ranks in the same processes while lost ones restart (horovodrun's elastic mode)",
    )
    add("--timeout", type=float, metavar="S", help="end the job after so many seconds, with exit code 124")
    add("--log-dir", metavar="DIR", help="write each rank's output to DIR/rank-N.log on its host")
    add(
        "--tag-output",
        action="store_true",
        default=None,
        help="begin each line with its rank, [3], or [3 host] on several hosts",
    )
    add(
        "--as-horovod",
        action="store_true",
        default=None,
        help="the program was written for Horovod: let `import horovod.torch` import dualdist.hvd",
    )
    add("--verbose", action="store_true", help="say how a default was chosen, and all that the launcher says")
    add("--dry-run", action="store_true", help="print what would run and start nothing; hosts are probed")
    add("--json", metavar="FILE", help="write how the job went to FILE, or to standard output for -")
    add("-m", dest="is_module", action="store_true", help="the program is a module, as for python -m")
    _add_scheduler_options(parser)
    add("program", nargs=argparse.REMAINDER, help="a script or module, and its arguments")
    parser.epilog = "Exit code: the first failed rank's, 128 + N for signal N; 75 if preempted."
    set_completions(parser, {"launcher": tuple(LAUNCHERS), "scheduler": tuple(SCHEDULERS)})


def _add_scheduler_options(parser: argparse.ArgumentParser) -> None:
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
    add("--kubeflow", metavar="V", help="v1: PyTorchJob or MPIJob (default); v2: TrainJob, of Kubeflow Trainer")
    add("--setup", action="append", metavar="LINE", help="a line of shell before the job; may be repeated")
    add("--job-name", metavar="NAME", help="default: the program's name")
    add("--write", metavar="FILE", help="write the script instead of printing it")
    add("--submit", action="store_true", default=None, help="submit it by sbatch, qsub, bsub or kubectl")


@dataclass(frozen=True)
class RunRequest:
    """The options of a job, of the command line or of a job file.

    `words` is the program and its arguments; `ranks` is None if no number was given. `resources` are for a scheduler.
    """

    words: tuple[str, ...] = ()
    is_module: bool = False
    ranks: int | None = None
    as_horovod: bool = False
    launcher: str | None = None
    backend: str | None = None
    transport: str | None = None
    hosts: tuple[Host, ...] = ()
    network_interface: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    min_ranks: int | None = None
    timeout: float | None = None
    log_dir: str | None = None
    tag_output: bool = False
    resources: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise UsageError(f"-np {self.ranks}: expected 1 or more")
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts}: expected 0 or more")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise UsageError(f"--timeout {self.timeout:g}: expected seconds above 0")

    @property
    def default_ranks(self) -> int:
        """The ranks: as given, else one per slot of the hosts, else 1."""
        return (sum(host.slots for host in self.hosts) or 1) if self.ranks is None else self.ranks

    @property
    def other_hosts(self) -> tuple[Host, ...]:
        """The hosts, unless all of them are this one."""
        return () if all(is_local_host(host.name) for host in self.hosts) else self.hosts

    def program(self, *, is_local: bool) -> tuple[str, ...]:
        """Return what follows `python` on a rank."""
        return program_words(self.words, is_module=self.is_module, as_horovod=self.as_horovod, is_local=is_local)


def parse_run_request(args: argparse.Namespace, environ: Mapping[str, str]) -> RunRequest:
    """Return the request of a command line and its job file."""
    options: dict[str, Any] = {}
    if args.config is not None:
        options = _read_job_file(Path(args.config), is_script=args.scheduler is not None)
    words = tuple(args.program[1:] if args.program[:1] == ["--"] else args.program)
    names = (word.partition("=")[0] for word in words[1:])
    late = [name for name in names if name in LATE and getattr(args, LATE[name]) is None]
    if late:
        print(f"dualdist run: {late[0]} goes to {words[0]}: options of dualdist run stand before it", file=sys.stderr)
    if words:
        options.update(words=words, is_module=args.is_module)
    elif args.is_module:
        raise UsageError("-m names no module: expected dualdist run [option ...] -m module")
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("-H and --hostfile both say where to run: give one of them")
    given = {name: getattr(args, name) for name in RUN_OPTIONS if getattr(args, name) is not None}
    if not given.keys().isdisjoint(("hosts", "hostfile")):
        options.update(hosts=None, hostfile=None)
    options |= given
    hosts, hostfile = options.pop("hosts", None), options.pop("hostfile", None)
    listed = parse_hosts(hosts) if hosts else ()
    options["hosts"] = listed if hostfile is None else read_hostfile(Path(hostfile))
    options["env"] = {**options.get("env", {}), **_variables(args.env, environ)}
    request = RunRequest(**options)
    if args.scheduler not in NODE_CHOOSING and (error := slots_error(request.default_ranks, request.hosts)):
        raise UsageError(error)
    return request


def _read_job_file(path: Path, *, is_script: bool) -> dict[str, Any]:
    """Return the options that a job file sets, whose relative paths are relative to the working directory."""
    try:
        job_file = importlib.import_module("dualdist.launch.job_file")
    except ModuleNotFoundError as error:
        raise UsageError(f"--config needs {error.name}: pip install 'dualdist[job]'") from error
    job = job_file.load(path, is_script=is_script, horovod_has_mpi=getattr(read_record(), "mpi", None))
    found: dict[str, Any] = job.model_dump(exclude_unset=True, exclude={"program", "module", "args"})
    if "hosts" in found:
        found["hosts"] = ",".join(job.hosts)
    if job.program is not None or job.module is not None:
        found.update(words=(job.module or job.program, *job.args), is_module=job.module is not None)
    return found


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
    request = parse_run_request(args, os.environ)
    program = request.program(is_local=args.scheduler is None)
    if args.scheduler is not None:
        return _schedule(args, request, program)
    for name in (*RESOURCES, "write", "submit"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is an option of job scripts: add --scheduler NAME")
    check_writable("--json", args.json)
    hosts = request.other_hosts
    launcher, ranks = _resolve(request, has_hosts=bool(hosts), is_verbose=args.verbose)
    for _, message in find_conflicts(
        launcher,
        request.backend,
        request.transport,
        ranks=ranks,
        has_hosts=bool(hosts),
        min_ranks=request.min_ranks,
        horovod_has_mpi=getattr(read_record(), "mpi", None),
    ):
        raise UsageError(message)
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
    )
    settings = RunSettings(
        is_dry=args.dry_run,
        max_restarts=request.max_restarts,
        stdout_to_stderr=args.json == "-",
        timeout_s=request.timeout,
        log_dir=request.log_dir,
        tag_output=request.tag_output,
        is_verbose=args.verbose,
    )
    with termination_raises():
        report = run_job(job, launcher, settings, os.environ)
    if args.dry_run:
        print("\n".join(shell_lines(report.commands)))
    elif report.outcome is not None:
        report_failure(report)
    write_json(args.json, report.to_json())
    return 0 if report.outcome is None else report.outcome.code


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
    uses_allocation = ALL[require_choice(launcher, ALL, "launcher")].uses_allocation
    is_open = uses_allocation and request.ranks is None and not request.hosts
    ranks, source = (allocated_tasks(os.environ) if is_open else None) or (request.default_ranks, "")
    is_usual = launcher == "torchrun" and not source
    if (request.launcher is None or source) and (is_verbose or not is_usual):
        started = f"{ranks} rank(s)" + (f" ({source}={ranks})" if source else "")
        print(f"dualdist run: {launcher} starts {started}, as {reason}", file=sys.stderr)
    return launcher, ranks


def _schedule(args: argparse.Namespace, request: RunRequest, program: Sequence[str]) -> int:
    """Print, write or submit the script of a job."""
    for name in (*RUN_ONLY_OPTIONS, "json"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: only for ranks that dualdist run starts itself; leave it out with --scheduler")
    ignored = [name for name in RUN_ONLY_OPTIONS if getattr(request, name)]
    hosts, ranks = request.hosts, request.ranks
    if args.scheduler == "workstation" and not request.other_hosts:  # its slots give its ranks
        hosts, ranks = (), request.default_ranks if hosts else ranks
    if hosts and args.scheduler != "ssh" and args.hosts is None and args.hostfile is None:
        ignored, hosts = [*ignored, "hosts"], ()
    if ignored:
        print(f"dualdist run: {args.scheduler} scripts ignore: {', '.join(ignored)}", file=sys.stderr)
    script_request = build_script_request(
        args.scheduler,
        program,
        launcher=request.launcher,
        ranks=ranks,
        hosts=hosts,
        resources=_merge_resources(args, request.resources),
        backend=request.backend,
        transport=request.transport,
        env={**interface_variables(request.network_interface), **request.env},
        handed_on=tuple(word for word in args.env if "=" not in word),
    )
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
    options = {name: getattr(args, name) for name in RESOURCES if getattr(args, name) is not None}
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
        print(f"dualdist run: {outcome.error}", file=sys.stderr)
    elif outcome.code == REQUEUE:
        print("dualdist run: the job stopped as requested; start it again to resume it", file=sys.stderr)
    elif outcome.stop_signal and outcome.code:
        print(f"dualdist run: the job was ended by {signal.Signals(outcome.stop_signal).name}", file=sys.stderr)
    elif outcome.failure is not None:
        print(f"dualdist run: {describe_failure(outcome.failure, has_hosts=report.is_multi_host)}", file=sys.stderr)
    elif outcome.code:
        print(
            f"dualdist run: {report.launcher} ended with exit code {outcome.code}; no rank reported a failure",
            file=sys.stderr,
        )


def program_words(words: Sequence[str], *, is_module: bool, as_horovod: bool, is_local: bool = True) -> tuple[str, ...]:
    """Return what follows `python` on a rank; UsageError if there is no program, or no such script on this host."""
    if not words:
        raise UsageError("no program: expected dualdist run [option ...] script.py, or -m and a module")
    if not is_module and is_local and not Path(words[0]).exists():
        is_python = Path(words[0]).name.startswith("python")
        hint = "leave out the interpreter: dualdist run -np 2 train.py" if is_python else "type -m before a module"
        raise UsageError(f"there is no script {words[0]!r} in {Path.cwd()}; {hint}")
    return (*(HVD_MODULE if as_horovod else ()), *(("-m",) if is_module else ()), *words)


def shell_line(built: Command) -> str:
    """Return the command with its variables and standard input, as one would type it in a shell."""
    changes = [*["-i"] * built.has_clean_env, *(f"--unset={name}" for name in built.unset)]
    changes += [f"{name}={value}" for name, value in built.env.items()]
    typed = shlex.join([*(["env", *changes] if changes else []), *built.argv])
    return f"{shlex.join(['echo', built.stdin])} | {typed}" if built.stdin else typed


def shell_lines(commands: Sequence[Command]) -> list[str]:
    """Return the commands of a job, for a shell that runs them concurrently."""
    if len(commands) == 1:
        return [shell_line(commands[0])]
    return [*(f"{shell_line(command)} &" for command in commands), "wait"]

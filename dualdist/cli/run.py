"""`dualdist run`: its options, and the run of a program on several ranks by a launcher."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dualdist.backends import registry
from dualdist.cli import schedule
from dualdist.cli.help_formatter import set_completions
from dualdist.cli.run_request import RunRequest, parse_run_request
from dualdist.errors import UsageError
from dualdist.launch.env_defaults import allocated_tasks, default_launcher
from dualdist.launch.failure import describe_failure
from dualdist.launch.job import Command
from dualdist.launch.launchers import ALL, LAUNCHERS
from dualdist.launch.processes import termination_raises
from dualdist.launch.runner import RunReport, run_job
from dualdist.launch.schedulers import SCHEDULERS
from dualdist.utils.preemption_protocol import REQUEUE
from dualdist.utils.suggest import require_choice

HVD_MODULE = ("-m", "dualdist.hvd")
EXAMPLES = (
    "dualdist run -np 2 train.py",
    "dualdist run -np 4 --launcher mpirun --backend mpi train.py --epochs 3",
    "dualdist run -H hosta:2,hostb:2 --tag-output train.py",
    "dualdist run --config job.yaml --scheduler slurm --write job.sh",
)
COMMON = {
    "ranks": "how many ranks",
    "launcher": "torchrun, horovodrun, mpirun, srun, spawn, ...",
    "backend": "native, horovod, mpi or auto",
    "hosts": "hosts, reached by ssh, and how many ranks each takes",
    "config": "a job file; options go before it",
    "env": "a variable of every rank; may be repeated",
    "tag_output": "begin each line with its rank",
    "timeout": "end the job after so many seconds",
    "scheduler": "print a job script: slurm, pbs, lsf, kubernetes, ...",
    "dry_run": "print what would run and start nothing",
    "json": "write how the job went",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this sub-command."""
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
        help="their backend (default: DUALDIST_BACKEND, else auto, or native with --as-horovod)",
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
    add("--config", metavar="JOB.yaml", help="a job file; options of the command line go before it")
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
    add("--tag-output", action="store_true", help="begin each line with its rank, [3], or [3 host] on several hosts")
    add(
        "--as-horovod",
        action="store_true",
        help="the program was written for Horovod: let `import horovod.torch` import dualdist.hvd",
    )
    add("--dry-run", action="store_true", help="print what would run and start nothing; hosts are probed")
    add("--json", metavar="FILE", help="write how the job went to FILE, or to standard output for -")
    add("-m", dest="is_module", action="store_true", help="the program is a module, as for python -m")
    schedule.configure(parser)
    add("program", nargs=argparse.REMAINDER, help="a script or module, and its arguments")
    parser.epilog = "Exit code: the first failed rank's, 128 + N for signal N; 75 if preempted."
    set_completions(parser, {"launcher": tuple(LAUNCHERS), "scheduler": tuple(SCHEDULERS)})


def run(args: argparse.Namespace) -> int:
    """Run the job to its end, or print its command line; return its exit code."""
    request = parse_run_request(args, os.environ)
    is_scripted = args.scheduler is not None
    words = program_words(
        request.words, is_module=request.is_module, as_horovod=request.as_horovod, is_local=not is_scripted
    )
    if is_scripted:
        return schedule.run(args, request, words)
    schedule.reject_scheduler_options(args)
    request, launcher = _resolve(request)
    request.require_possible(launcher)
    with termination_raises():
        report = run_job(request.job(words), launcher, request.settings(args), os.environ)
    if args.dry_run:
        print("\n".join(shell_lines(report.commands)))
    elif report.outcome is not None:
        report_failure(report)
    if args.json is not None:
        write_json(args.json, report.to_json())
    return 0 if report.outcome is None else report.outcome.code


def _resolve(given: RunRequest) -> tuple[RunRequest, str]:
    """Return the request with its number of ranks, and its launcher; report defaults on stderr."""
    request, launcher, reason = given.without_local_hosts(), given.launcher, "no -np was given"
    if launcher is None:
        launcher, reason = default_launcher(
            {**os.environ, **request.env},
            request.backend,
            request.transport,
            has_hosts=bool(request.hosts),
            is_elastic=request.min_ranks is not None,
        )
    uses_allocation = ALL[require_choice(launcher, ALL, "launcher")].uses_allocation
    is_open = uses_allocation and given.given_ranks is None and not given.hosts
    tasks, source = (allocated_tasks(os.environ) if is_open else None) or (request.ranks, "")
    if given.launcher is None or source:
        started = f"{tasks} rank(s)" + (f" ({source}={tasks})" if source else "")
        print(f"dualdist run: {launcher} starts {started}, as {reason}", file=sys.stderr)
    return replace(request, ranks=tasks), launcher


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
        hint = "leave the interpreter out, as in dualdist run -np 2 train.py" if is_python else "or -m for a module?"
        raise UsageError(f"there is no script {words[0]!r} in {Path.cwd()}; {hint}")
    return (*(HVD_MODULE if as_horovod else ()), *(("-m",) if is_module else ()), *words)


def shell_line(built: Command) -> str:
    """Return the command with its variables and standard input, as one would type it in a shell."""
    changes = [*["-i"] * built.has_clean_env, *(f"--unset={name}" for name in built.unset)]
    changes += [f"{name}={value}" for name, value in built.env.items()]
    typed = shlex.join([*(["env", *changes] if changes else []), *built.argv])
    return f"{shlex.join(['echo', built.stdin])} | {typed}" if built.stdin else typed


def shell_lines(commands: Sequence[Command]) -> Iterator[str]:
    """Yield the commands of a job, for a shell that runs them concurrently."""
    if len(commands) == 1:
        yield shell_line(commands[0])
        return
    yield from (f"{shell_line(command)} &" for command in commands)
    yield "wait"


def write_json(name: str, text: str) -> None:
    if name == "-":
        sys.stdout.write(f"{text}\n")
        return
    try:
        Path(name).write_text(f"{text}\n")
    except OSError as error:
        raise UsageError(
            f"--json {name}: cannot write it ({error.strerror}); name another file, or - for stdout"
        ) from error

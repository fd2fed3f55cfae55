"""`dualdist doctor`: the options, and what they ask for: findings, an explanation, jobs, hosts, mending."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from dualdist.backends.availability import Availability
from dualdist.cli.help_formatter import set_completions
from dualdist.doctor.diagnosis import LEAST_RANKS, Diagnosis, diagnose, installed_backends, place, place_json, to_json
from dualdist.doctor.explain import TopologyExplanation, explain
from dualdist.doctor.findings import Level
from dualdist.doctor.host import may_use_gpus
from dualdist.errors import UsageError
from dualdist.launch.job import BACKEND_TRANSPORTS
from dualdist.launch.launchers import MULTI_RANK_LAUNCHERS
from dualdist.topology import Topology
from dualdist.utils.redaction import make_redactor, redact_json

STYLES: dict[Level, tuple[str, ...]] = {"error": ("red", "bold"), "warning": ("yellow", "bold"), "info": ("blue",)}
VERDICTS = {0: "nothing is wrong here", 1: "something may fail", 2: "something will fail"}


def lines(diagnosis: Diagnosis, paint: Painter) -> Iterator[str]:
    """Where this process is and what it can use, in three lines; the findings, the worst first; what they amount to."""
    topology = diagnosis.topology
    yield f"{'place':<10}{'unknown: the variables are broken, see below' if topology is None else _place(topology)}"
    usable = [f"{name}{_built(backend)}" for name, backend in diagnosis.backends.items() if backend.available]
    lacking = [f"{name}: {backend.reason}" for name, backend in diagnosis.backends.items() if not backend.available]
    yield f"{'backends':<10}{', '.join(usable) or 'none'}{''.join(f'; not {each}' for each in lacking)}"
    versions = ", ".join(f"{name} {version or 'none'}" for name, version in diagnosis.versions.items())
    yield f"{'versions':<10}{versions}"
    for finding in diagnosis.findings:
        yield ""
        yield f"{paint(finding.level, *STYLES[finding.level])}: {finding.seen}  {paint(f'[{finding.name}]', 'dim')}"
        yield f"  why: {finding.why}"
        yield f"  do:  {finding.do}"
    counts = Counter(finding.level for finding in diagnosis.findings)
    told = ", ".join(f"{counts[level]} {level}{'s' if counts[level] > 1 else ''}" for level in STYLES if counts[level])
    yield ""
    yield f"{VERDICTS[diagnosis.exit_code]}{f' ({told})' if told else ''}"


def tried_lines(cells: Mapping[str, Any] | None, paint: Painter) -> Iterator[str]:
    """Which cells were started, and which were not."""
    if cells is None:
        return
    failed = sum(bool(each["problem"]) for each in cells["tried"])
    yield f"{len(cells['tried'])} ways to run were tried, {failed} failed"
    for each in cells["tried"]:
        state = paint("FAILED", "red", "bold") if each["problem"] else paint("works", "green")
        yield f"  {state:<6}  {each['launcher']}, {each['backend']} over {each['transport']}, {each['seconds']:.1f} s"
    reasons = Counter(each["reason"] for each in cells["left_out"])
    if reasons:
        yield f"{len(cells['left_out'])} were left out:"
        yield from (f"  {count:>2} as {reason}" for reason, count in reasons.most_common())


def explained(explanation: TopologyExplanation, paint: Painter) -> Iterator[str]:
    """Every part of the place with its source, and what did not count."""
    if explanation.error:
        yield f"{paint('error', *STYLES['error'])}: {explanation.error}"
    width = max((len(part.value) for part in explanation.parts), default=0)
    for part in explanation.parts:
        yield f"{part.name.replace('_', ' '):<12}{part.value:<{width}}  {paint(part.source, 'dim')}"
    if explanation.ignored:
        yield "ignored:" if explanation.parts else "set, too:"
        yield from (f"  {each.name}={each.value}  {paint(each.why, 'dim')}" for each in explanation.ignored)


def _place(topology: Topology) -> str:
    def told(name: str) -> str:
        return f"{getattr(topology, name)}{' (inferred)' if name in topology.inferred else ''}"

    if topology.launcher == "none":
        return "no launcher started this process: a job of one rank"
    return (
        f"rank {topology.rank} of {topology.size}, local rank {told('local_rank')} of {told('local_size')}, "
        f"node {told('node_rank')} of {told('num_nodes')}, by {topology.launcher} ({topology.source})"
    )


def _built(backend: Availability) -> str:
    built = [word for word, has in (("gloo", backend.gloo), ("mpi", backend.mpi), ("nccl", backend.nccl)) if has]
    return f" (built with {', '.join(built)})" if built else ""


NO_COLOR = "NO_COLOR"
TERMINAL = "TERM"
CODES = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "bold": 1, "dim": 2}


def is_coloured(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether what is written there may have colours."""
    return stream.isatty() and not environ.get(NO_COLOR) and environ.get(TERMINAL, "dumb") != "dumb"


class Painter:
    """Colours words for a stream, or leaves them as they are."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        self._is_on = is_coloured(stream, environ)

    def __call__(self, text: str, *styles: str) -> str:
        codes = ";".join(str(CODES[style]) for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m" if self._is_on and codes else text


# Of an error: 1 says that there are warnings.
ERROR_CODE = 2
EXAMPLES = (
    "dualdist doctor",
    "dualdist doctor --run -np 2",
    "dualdist doctor --hosts a:4,b:4 --json report.json",
    "srun -n 4 dualdist doctor --explain-env",
)
COMMON = {
    "explain_env": "which variable told what, and which were ignored",
    "ranks": "look whether so many ranks fit here (default: 2)",
    "run": "start every usable way, and run one collective",
    "hosts": "ask these hosts by ssh, and have them call each other",
    "fix": "install and build what is missing, each after asking",
    "json": "write JSON to FILE as well, or - for stdout alone",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of this sub-command."""
    add = parser.add_argument
    add("--explain-env", action="store_true", help="say from which variable each part of the topology came, and why")
    add("-np", "--ranks", type=int, metavar="N", help="look whether so many ranks fit on this host (default: 2)")
    add("--run", action="store_true", help="start ranks by every usable launcher, backend and transport")
    add("--launchers", metavar="A,B", help="only these, with --run")
    add("--backends", metavar="A,B", help="only these, with --run")
    add("--hosts", metavar="A:2,B:2", help="ask these hosts by ssh, and have them call each other")
    add("--hostfile", metavar="FILE", help="the same from a file, as dualdist run has it")
    add("--fix", action="store_true", help="install and build what is missing, each after asking")
    add("--yes", action="store_true", help="do not ask, with --fix")
    add("--json", metavar="FILE", help="write JSON to FILE as well, or to standard output alone for -")
    set_completions(parser, {"launchers": MULTI_RANK_LAUNCHERS, "backends": tuple(BACKEND_TRANSPORTS)})
    parser.epilog = "Exit code: 0 if nothing is wrong, 1 if something may fail, 2 if something will."


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; its exit code says how bad it is."""
    _check(args)
    redact = make_redactor(os.environ)
    if args.explain_env:
        return _explain(args, redact)
    diagnosis = diagnose(os.environ, args.ranks)
    if args.fix:
        diagnosis = _fixed(args, diagnosis)
    more: dict[str, Any] = {}
    if args.hosts is not None or args.hostfile is not None:
        diagnosis, more["hosts"] = _with_hosts(args, diagnosis)
    if args.run:
        diagnosis, more["cells"] = _with_cells(args, diagnosis)
    _put_out(args, redact_json({**to_json(diagnosis), **more}, redact))
    if args.json != "-":
        paint = Painter(sys.stdout, os.environ)
        _print([*lines(diagnosis, paint), *tried_lines(more.get("cells"), paint)], redact)
    return diagnosis.exit_code


def _check(args: argparse.Namespace) -> None:
    if args.ranks is not None and args.ranks < 1:
        raise UsageError(f"-np {args.ranks}: expected 1 or more")
    for name, needed in (("launchers", "run"), ("backends", "run"), ("yes", "fix")):
        if getattr(args, name) and not getattr(args, needed):
            raise UsageError(f"--{name} goes with --{needed}")
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("--hosts and --hostfile both name hosts: give one of them")
    if args.run:
        _check_run(args)
    if args.json not in (None, "-") and not Path(args.json).resolve().parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no folder {Path(args.json).resolve().parent}")


def _check_run(args: argparse.Namespace) -> None:
    """Before a diagnosis, which takes seconds."""
    from dualdist.bench.compare.matrix import expand_configs

    found = place(os.environ)
    if not isinstance(found, Topology) or found.launcher != "none":
        raise UsageError("--run starts ranks itself: type it where no launcher has started this process")
    expand_configs(
        _words(args.launchers) or MULTI_RANK_LAUNCHERS,
        _words(args.backends) or list(BACKEND_TRANSPORTS),
        None,
        os.environ,
    )


def _explain(args: argparse.Namespace, redact: Callable[[str], str]) -> int:
    found = place(os.environ)
    explanation = explain(os.environ, found, installed_backends(), has_gpu=may_use_gpus(os.environ))
    known = {"topology": place_json(found) if isinstance(found, Topology) else None, **explanation.to_json()}
    _put_out(args, redact_json(known, redact))
    if args.json != "-":
        _print(explained(explanation, Painter(sys.stdout, os.environ)), redact)
    return 2 if explanation.error else 0


def _fixed(args: argparse.Namespace, diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis after what the user agreed to."""
    from dualdist.doctor.findings import apply, fixes

    todo = fixes(diagnosis.findings)
    if not todo:
        _say("there is nothing here that --fix could mend")
        return diagnosis
    done = apply(todo, os.environ, (lambda _: True) if args.yes else _ask, _say)
    return diagnose(os.environ, args.ranks) if done else diagnosis


def _ask(question: str) -> bool:
    """The user's yes; nobody there says no."""
    if not sys.stdin.isatty():
        _say(f"{question} [not asked: this is no terminal; --yes means yes]")
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _with_hosts(args: argparse.Namespace, diagnosis: Diagnosis) -> tuple[Diagnosis, list[Any]]:
    from dualdist.doctor import hosts
    from dualdist.doctor.checks import hosts as of_hosts
    from dualdist.launch import hosts as host_lists
    from dualdist.launch.env_defaults import rank_variables
    from dualdist.launch.execute import find_site

    named = (
        host_lists.parse_hosts(args.hosts) if args.hosts is not None else host_lists.read_hostfile(Path(args.hostfile))
    )
    forwarded = rank_variables(os.environ, {}, threads_a_rank=None, interface=None, has_hosts=True)
    reported = hosts.ask(named, find_site(), forwarded)
    told = [
        {**asdict(each), "reached": {name: [[*at, why] for at, why in to.items()] for name, to in each.reached.items()}}
        for each in reported
    ]
    return diagnosis.with_more(list(of_hosts.find(reported))), told


def _with_cells(args: argparse.Namespace, diagnosis: Diagnosis) -> tuple[Diagnosis, dict[str, Any]]:
    from dualdist.doctor import smoke_test as cells
    from dualdist.launch.execute import find_site
    from dualdist.launch.processes import termination_raises

    site, ranks = find_site(), args.ranks or LEAST_RANKS
    can, cannot = cells.usable(
        ranks, os.environ, site, diagnosis.backends, diagnosis.gpus, _words(args.launchers), _words(args.backends)
    )
    with termination_raises():
        tried = cells.try_all(can, ranks, site, _say)
    known = {
        "tried": [asdict(each) for each in tried],
        "left_out": [{**asdict(refused.cell.config), "reason": refused.reason} for refused in cannot],
    }
    return diagnosis.with_more(list(cells.find(tried))), known


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _say(line: str) -> None:
    print(make_redactor(os.environ)(line), file=sys.stderr, flush=True)


def _print(said: Iterable[str], redact: Callable[[str], str]) -> None:
    sys.stdout.write("".join(f"{redact(line)}\n" for line in said))
    sys.stdout.flush()


def _put_out(args: argparse.Namespace, known: Mapping[str, Any]) -> None:
    text = json.dumps(known, indent=1)
    if args.json == "-":
        sys.stdout.write(f"{text}\n")
    elif args.json is not None:
        try:
            Path(args.json).write_text(f"{text}\n")
        except OSError as error:
            raise UsageError(
                f"--json {args.json}: cannot write it ({error.strerror}); name another file, or - for stdout"
            ) from error

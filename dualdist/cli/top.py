"""`dualdist top`: show what each rank of a running job does; see liveness/rank_status.py."""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualdist.errors import DualdistError, UsageError
from dualdist.liveness.process_state import format_stack
from dualdist.liveness.rank_status import RankStatus, RunningJob, find_jobs, late_ranks, look
from dualdist.utils.redaction import redact_command

WATCH_S = 2.0
# Parts of the paths of files that are not the program's.
NOT_OWN = ("<frozen ", "/lib/python3", "/site-packages/", "/dist-packages/")
CLEAR = "\x1b[H\x1b[J"
HEAD = ("rank", "host", "pid", "step", "step time", "waited", "memory", "CPU", "")
EXAMPLES = ("dualdist top", "dualdist top --once --json", "dualdist top 4242 --stack 1")
COMMON = dict.fromkeys(("job", "once", "json", "stack"), "")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("job", nargs="?", type=int, metavar="JOB", help="the job's number; needed if several run here")
    add("--once", action="store_true", help="look once, not until Ctrl-C or the job's end")
    add("--json", action="store_true", help="print a line of JSON for each look")
    add("--stack", type=int, metavar="RANK", help="print this rank's Python stack")
    parser.usage = "dualdist top [JOB] [option ...]"
    parser.epilog = f"Exit code: 0, or 1 if no such job runs. Each look watches the ranks for {WATCH_S:g} s."


def run(args: argparse.Namespace) -> int:
    """Show the job until it ends; without its number list the jobs if there are several."""
    if args.stack is not None and args.json:
        raise UsageError("--stack prints text: leave out --json, or --stack, as the JSON has the stack of each rank")
    jobs = find_jobs()
    if args.job is None and len(jobs) > 1:
        _print_jobs(jobs, as_json=args.json)
        return 0
    job = _choose(jobs, args.job)
    if args.stack is not None:
        _print_stack(job, args.stack)
        return 0
    try:
        return _show(job, args)
    except KeyboardInterrupt:
        return 0


def _choose(jobs: Mapping[int, RunningJob], number: int | None) -> RunningJob:
    """Return the job of this number, or the only one."""
    job = next(iter(jobs.values()), None) if number is None else jobs.get(number)
    if job is not None:
        return job
    which = "no job" if number is None else f"no job {number}"
    running = f"running: {', '.join(map(str, jobs))}" if jobs else "none is running"
    raise DualdistError(
        f"{which} of this user has ranks on this host ({running}): a job is seen from dd.init() on, by the user who "
        "started it, on the hosts of its ranks"
    )


def _print_jobs(jobs: Mapping[int, RunningJob], *, as_json: bool) -> None:
    if as_json:
        listed = [{"job": job.number, "size": job.size, "program": _program(job)} for job in jobs.values()]
        print(json.dumps({"jobs": listed}))
        return
    rows = [("job", "ranks", "program"), *((str(job.number), str(job.size), _program(job)) for job in jobs.values())]
    print("\n".join(_align(rows)))
    print("dualdist top JOB shows one of them")


def _program(job: RunningJob) -> str:
    return shlex.join(redact_command(job.program()))


def _show(job: RunningJob, args: argparse.Namespace) -> int:
    """Print the ranks until the job ends."""
    clears = sys.stdout.isatty() and not args.once
    seen: RunningJob | None = job
    looks = 0
    while seen is not None and (found := look(seen, WATCH_S)):
        looks += 1
        text = json.dumps(_to_json(seen, found)) if args.json else "\n".join(format_job(seen, found))
        print(f"{CLEAR if clears and not args.json else ''}{text}", flush=True)
        if args.once:
            return 0
        seen = find_jobs().get(job.number)  # its ranks may have changed
    print(f"dualdist top: job {job.number} has ended", file=sys.stderr)
    return 0 if looks else 1


def _to_json(job: RunningJob, found: Mapping[int, RankStatus | str]) -> dict[str, Any]:
    late, ranks = late_ranks(found), []
    for rank, status in found.items():
        if isinstance(status, RankStatus):
            ranks.append({**asdict(status), "line": _line(status), "late": rank in late, "problem": ""})
        else:
            ranks.append({"rank": rank, "late": rank in late, "problem": status})
    return {"job": job.number, "size": job.size, "program": _program(job), "ranks": ranks}


def format_job(job: RunningJob, found: Mapping[int, RankStatus | str]) -> Iterator[str]:
    """Yield a line about the job, and one for each of its ranks."""
    late = late_ranks(found)
    launchers = {status.launcher for status in found.values() if isinstance(status, RankStatus)}
    yield f"job {job.number}: {_program(job)}"
    yield f"{job.size} ranks, started by {', '.join(launchers) or 'an unknown launcher'}"
    rows = [_row(rank, status, is_late=rank in late) for rank, status in found.items()]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    yield from (line[:columns] for line in _align([HEAD, *rows]))


def _row(rank: int, status: RankStatus | str, *, is_late: bool) -> Sequence[str]:
    mark = "LATE " if is_late else ""
    if isinstance(status, str):
        return (str(rank), *("-" for _ in HEAD[2:]), f"{mark}{status}")
    since = f" for {status.seconds:.0f} s" if status.seconds is not None and status.seconds >= 1 else ""
    return (
        str(rank),
        status.host,
        str(status.pid),
        str(status.steps or "-"),
        "-" if status.step_s is None else f"{1000 * status.step_s:.0f} ms",
        f"{status.waited:.0%}",
        f"{status.memory_bytes / 2**20:.0f} MiB",
        f"{status.cores:.0%}",
        f"{mark}{_location(status)}{since}",
    )


def _location(status: RankStatus) -> str:
    """Return the operation, or the line of the program and its function."""
    return f"in {status.operation}" if status.operation else _line(status)


def _line(status: RankStatus) -> str:
    """Return the innermost line outside of Python and installed packages, or, without one, the innermost."""
    own = [line for line in status.stack if not any(part in line[0] for part in NOT_OWN)]
    file, line, function = (own or status.stack or [("the program", 0, "it")])[-1]
    return f"{Path(file).name}:{line} in {function}"


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows with columns of equal width, right-aligned except for the last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, last in rows:
        yield "  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)), last]).rstrip()


def _print_stack(job: RunningJob, rank: int) -> None:
    if not 0 <= rank < job.size:
        raise UsageError(f"--stack {rank}: job {job.number} has the ranks 0 to {job.size - 1}")
    status = look(job, 0.0).get(rank, "has ended")
    if isinstance(status, str):
        raise DualdistError(f"rank {rank} {status}")
    print(f"rank {rank} on {status.host}, process {status.pid}: {_location(status)}{format_stack(status.stack)}")

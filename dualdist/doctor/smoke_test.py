"""`dualdist doctor --run`: one collective in every usable cell (launcher, backend, transport).

Each rank runs: python -m dualdist.doctor.smoke_test [--spawn RANKS] FOLDER
"""

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualdist.bench.jobs import SPAWN, MeasurementSettings, PlannedJob, RunConfig, program_command
from dualdist.bench.report import error_summary
from dualdist.doctor.checks import Finding, error
from dualdist.errors import LaunchError
from dualdist.launch.execute import run_command
from dualdist.launch.job import Site
from dualdist.launch.spawn import spawn_without_main

SPAWN_OPTION = "--spawn"
PROGRAM = ("-m", "dualdist.doctor.smoke_test")
JOB_TIMEOUT_S = 90.0
INIT_TIMEOUT_S = 30.0


def run_rank(folder: str) -> None:
    """Run one allreduce on this rank and write its report; raise AssertionError for a wrong sum."""
    import torch

    import dualdist as dd

    dd.init(timeout_s=INIT_TIMEOUT_S)
    rank, size = dd.rank(), dd.size()
    # Powers of two reveal a rank that is missing or counted twice.
    result = dd.allreduce(torch.full((1000,), 2**rank, dtype=torch.int64, device=dd.device()), "sum")
    expected = 2**size - 1
    if not bool((result == expected).all()):
        raise AssertionError(f"the sum over {size} ranks is {int(result[0])}, expected {expected}")
    report = {"rank": rank, "backend": dd.backend(), "transport": dd.transport(), "launcher": dd.launcher()}
    dd.shutdown()
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(report))


def main(argv: Sequence[str]) -> int:
    """Run one rank, or all of them by dd.spawn."""
    if argv[0] == SPAWN_OPTION:
        spawn_without_main(run_rank, int(argv[1]), (argv[2],))
    else:
        run_rank(argv[0])
    return 0


@dataclass(frozen=True)
class SmokeTestResult:
    """A cell that was run; `problem` is "" if its ranks got the right sum."""

    launcher: str
    backend: str
    transport: str | None
    command: str
    seconds: float
    problem: str = ""


def run_cells(cells: Sequence[RunConfig], ranks: int, site: Site, log: Callable[[str], None]) -> list[SmokeTestResult]:
    """Run the cells one after another."""
    results = []
    for number, cell in enumerate(cells, 1):
        with tempfile.TemporaryDirectory(prefix="dualdist-doctor-", ignore_cleanup_errors=True) as folder:
            result = _run_cell(cell, ranks, site, Path(folder))
        log(f"[{number}/{len(cells)}] {cell}: {'failed' if result.problem else 'works'}, {result.seconds:.1f} s")
        results.append(result)
    return results


def find(results: Iterable[SmokeTestResult]) -> Iterator[Finding]:
    """Yield the failed cells."""
    for each in results:
        if each.problem:
            yield error(
                "cell-failed",
                f"{each.backend} over {each.transport} ({each.launcher}) fails: {each.problem}",
                "no check ruled it out, and every such job will fail in the same way",
                f"run it to see the full output of its ranks: {each.command}",
            )


def _run_cell(config: RunConfig, ranks: int, site: Site, folder: Path) -> SmokeTestResult:
    start = time.monotonic()
    program = (*PROGRAM, *((SPAWN_OPTION, str(ranks)) if config.launcher == SPAWN else ()))
    command = program_command(config, (*program, str(folder)), MeasurementSettings(ranks, site))
    job = PlannedJob(str(config), command, tuple(folder / f"rank-{rank}.json" for rank in range(ranks)))
    try:
        result = run_command(command, timeout_s=JOB_TIMEOUT_S, what=job.title)
        if result.code:
            problem = error_summary(result.output) or f"exit code {result.code}, without output"
        else:
            problem = _check_reports(config.backend, config.transport, job.reports)
    except LaunchError as error:
        problem = str(error)
    # The folder of the reports is deleted: print a command that writes them to another one.
    line = job.command_line.replace(shlex.quote(str(folder)), tempfile.gettempdir())
    return SmokeTestResult(config.launcher, config.backend, config.transport, line, time.monotonic() - start, problem)


def _check_reports(backend: str, transport: str | None, reports: Sequence[Path]) -> str:
    missing = sum(not path.exists() for path in reports)
    if missing:
        return f"exit code 0, but {missing} of {len(reports)} ranks did not report"
    for report in (json.loads(path.read_text()) for path in reports):
        if (report["backend"], report["transport"]) != (backend, transport):
            return f"rank {report['rank']} ran on {report['backend']} over {report['transport']}"
    return ""


if __name__ == "__main__":
    # Under its full name, so that spawned processes can import run_rank.
    from dualdist.doctor import smoke_test

    sys.exit(smoke_test.main(sys.argv[1:]))

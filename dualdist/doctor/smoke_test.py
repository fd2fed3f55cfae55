"""`dualdist doctor --run`: one collective in every usable cell (launcher, backend, transport)."""

import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualdist.bench.jobs import AllreduceOptions, MeasurementSettings, PlannedJob, RunConfig, run_job, worker_command
from dualdist.bench.report import error_summary
from dualdist.doctor.checks import Finding, error
from dualdist.errors import LaunchError
from dualdist.launch.job import Site

JOB_TIMEOUT_S = 90.0
INIT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class SmokeTestResult:
    """A cell that was run; `problem` is "" if its ranks got the right sum."""

    launcher: str
    backend: str
    transport: str | None
    command: str
    seconds: float
    problem: str


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
    for each in results:
        if each.problem:
            yield error(
                "cell-failed",
                f"{each.backend} over {each.transport} ({each.launcher}) fails: {each.problem}",
                "no check ruled it out, and every such job will fail in the same way",
                f"run it to see the full output of its ranks: {each.command}",
            )


def _run_cell(config: RunConfig, ranks: int, site: Site, folder: Path) -> SmokeTestResult:
    start, report, problem = time.monotonic(), folder / "report.json", ""
    options, settings = AllreduceOptions((), timeout_s=INIT_TIMEOUT_S), MeasurementSettings(ranks, site)
    job = PlannedJob(str(config), worker_command(config, "sum", options, report, settings), (report,))
    try:
        (found,) = run_job(job, JOB_TIMEOUT_S)
        if (found["backend"], found["transport"]) != (config.backend, config.transport):
            problem = f"it ran on {found['backend']} over {found['transport']}"
    except LaunchError as failure:
        problem = error_summary(str(failure))
    # The folder of the report is deleted: print a command that writes it to another one.
    line = job.command_line.replace(shlex.quote(str(folder)), tempfile.gettempdir())
    return SmokeTestResult(config.launcher, config.backend, config.transport, line, time.monotonic() - start, problem)

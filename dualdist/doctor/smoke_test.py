"""`dualdist doctor --run`: one collective in every usable cell (launcher, backend, transport)."""

import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualdist.bench.jobs import AllreduceOptions, MeasurementSettings, PlannedJob, RunConfig, run_job, worker_command
from dualdist.bench.report import error_summary
from dualdist.doctor.checks import Finding, error
from dualdist.errors import LaunchError
from dualdist.launch.job import Site

JOB_TIMEOUT_S = 90.0
INIT_TIMEOUT_S = 30.0


def run_cells(cells: Sequence[RunConfig], ranks: int, site: Site, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run the cells one after another; return each with its command, seconds and problem, "" if the sum is right."""
    results = []
    for number, cell in enumerate(cells, 1):
        with tempfile.TemporaryDirectory(prefix="dualdist-doctor-", ignore_cleanup_errors=True) as folder:
            result = _run_cell(cell, ranks, site, Path(folder))
        state = "failed" if result["problem"] else "works"
        log(f"[{number}/{len(cells)}] {cell}: {state}, {result['seconds']:.1f} s")
        results.append(result)
    return results


def find(results: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for each in results:
        if each["problem"]:
            yield error(
                "cell-failed",
                f"{each['backend']} over {each['transport']} ({each['launcher']}) fails: {each['problem']}",
                "no check ruled it out, and every such job will fail in the same way",
                f"run it to see the full output of its ranks: {each['command']}",
            )


def _run_cell(config: RunConfig, ranks: int, site: Site, folder: Path) -> dict[str, Any]:
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
    return {**asdict(config), "command": line, "seconds": time.monotonic() - start, "problem": problem}

"""`dualdist doctor --run`: start every usable cell (launcher, backend, transport); its ranks run one collective.

The ranks run: python -m dualdist.doctor.smoke_test [--spawn RANKS] FOLDER TIMEOUT_S
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualdist.backends.availability import Availability
from dualdist.bench.compare.matrix import Cell, MatrixFacts, RefusedCell, expand_configs, split_runnable
from dualdist.bench.jobs import SPAWN, MeasurementSettings, PlannedJob, program_command
from dualdist.doctor.findings import Finding
from dualdist.errors import LaunchError
from dualdist.launch.env_defaults import SLURM_JOB
from dualdist.launch.execute import run_command
from dualdist.launch.failure import EXCEPTION, extract_traceback
from dualdist.launch.job import BACKEND_TRANSPORTS
from dualdist.launch.launchers import MULTI_RANK_LAUNCHERS, Site
from dualdist.launch.spawn import spawn_without_main

SPAWN_OPTION = "--spawn"


def work(folder: str, timeout_s: float) -> None:
    """One rank's part; AssertionError where the sum is wrong."""
    import torch

    import dualdist as dd

    dd.init(timeout_s=timeout_s)
    rank, size = dd.rank(), dd.size()
    # Powers of two: a rank that is missing or counted twice shows. On the device on which it would train.
    found = dd.allreduce(torch.full((1000,), 2**rank, dtype=torch.int64, device=dd.device()), "sum")
    expected = 2**size - 1
    if not bool((found == expected).all()):
        raise AssertionError(f"the sum over {size} ranks is {int(found[0])}, expected {expected}")
    told = {"rank": rank, "backend": dd.backend(), "transport": dd.transport(), "launcher": dd.launcher()}
    dd.shutdown()
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(told))


def main(words: Sequence[str]) -> int:
    if words[0] == SPAWN_OPTION:
        spawn_without_main(work, int(words[1]), (words[2], float(words[3])))
    else:
        work(words[0], float(words[1]))
    return 0


TRIAL = ("-m", "dualdist.doctor.smoke_test")
CELL_S = 90.0
WAIT_S = 30.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class TriedCell:
    """A cell that was started. `problem` says how it failed, "" where its ranks got the right sum."""

    launcher: str
    backend: str
    transport: str | None
    command: str
    seconds: float
    problem: str = ""

    @property
    def label(self) -> str:
        return f"{self.backend} over {self.transport} ({self.launcher})"


def usable(
    ranks: int,
    environ: Mapping[str, str],
    site: Site,
    backends: Mapping[str, Availability],
    gpus: int,
    launchers: Sequence[str] | None = None,
    wanted: Sequence[str] | None = None,
) -> tuple[list[Cell], list[RefusedCell]]:
    """The cells that can run here as far as is known, and the others with the reasons."""
    facts = MatrixFacts(gpus, "auto", backends, is_in_slurm=SLURM_JOB in environ)
    places = expand_configs(launchers or MULTI_RANK_LAUNCHERS, wanted or list(BACKEND_TRANSPORTS), None, environ)
    return split_runnable(places, MeasurementSettings(ranks), site, facts)


def try_all(cells: Iterable[Cell], ranks: int, site: Site, tell: Tell) -> list[TriedCell]:
    """Every cell's job, one after another."""
    cells, found = list(cells), []
    for number, cell in enumerate(cells, 1):
        with tempfile.TemporaryDirectory(prefix="dualdist-doctor-", ignore_cleanup_errors=True) as folder:
            tried = _try(cell, ranks, site, Path(folder))
        tell(f"[{number}/{len(cells)}] {cell.label}: {'failed' if tried.problem else 'works'}, {tried.seconds:.1f} s")
        found.append(tried)
    return found


def find(tried: Iterable[TriedCell]) -> Iterable[Finding]:
    """What failed of what should work."""
    for each in tried:
        if each.problem:
            yield Finding(
                "cell-failed",
                "error",
                f"{each.label} fails: {each.problem}",
                "nothing was known against it, and a job like this one will fail in the same way",
                f"see all that its ranks say: {each.command}",
            )


def last_words(output: str) -> str:
    """The line that says best why ranks failed: an exception's own, as launchers have much to say after it."""
    lines = [line.strip() for line in extract_traceback(output).splitlines() if any(map(str.isalnum, line))]
    exceptions = [line for line in lines if EXCEPTION.match(line)]
    return (exceptions or lines or [""])[-1]


def _planned(cell: Cell, ranks: int, site: Site, folder: Path) -> PlannedJob:
    words = (str(folder), f"{WAIT_S:g}")
    program = (*TRIAL, SPAWN_OPTION, str(ranks), *words) if cell.config.launcher == SPAWN else (*TRIAL, *words)
    built = program_command(cell.config, program, MeasurementSettings(ranks), site)
    return PlannedJob(cell.label, built, tuple(folder / f"rank-{rank}.json" for rank in range(ranks)))


def _try(cell: Cell, ranks: int, site: Site, folder: Path) -> TriedCell:
    planned, place, began = _planned(cell, ranks, site, folder), cell.config, time.monotonic()
    try:
        result = run_command(planned.command, timeout_s=CELL_S, what=planned.title)
        problem = _problem(place.backend, place.transport, planned, result.code, result.output)
    except LaunchError as error:
        problem = str(error)
    # The folder of the reports is gone afterwards: any other does for a person.
    command = planned.command_line.replace(shlex.quote(str(folder)), tempfile.gettempdir())
    return TriedCell(place.launcher, place.backend, place.transport, command, time.monotonic() - began, problem)


def _problem(backend: str, transport: str | None, planned: PlannedJob, code: int, output: str) -> str:
    if code:
        return last_words(output) or f"exit code {code}, and nothing was said"
    missing = sum(not path.exists() for path in planned.reports)
    if missing:
        return f"it ended well, but {missing} of {len(planned.reports)} ranks did not report"
    for path in planned.reports:
        told = json.loads(path.read_text())
        if (told["backend"], told["transport"]) != (backend, transport):
            return f"rank {told['rank']} ran on {told['backend']} over {told['transport']}"
    return ""


if __name__ == "__main__":
    # By its full name, which the new processes can import: theirs is another __main__.
    from dualdist.doctor import smoke_test

    sys.exit(smoke_test.main(sys.argv[1:]))

"""From a cell to a launched job, and from what its ranks left to a Launch in a file."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dualdist.bench.cases import TrainOptions
from dualdist.bench.compare import launches as files
from dualdist.bench.compare.launches import Launch, RankRecord, foreign_of
from dualdist.bench.compare.matrix import DUALDIST, Cell
from dualdist.bench.jobs import FOREIGN, MeasurementSettings, PlannedJob, program_command, run_job, worker_command
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.launchers import Site
from dualdist.session import RECORD, RECORD_STEPS, RECORD_WARMUP

CONDITIONS = "conditions.json"
LAUNCHES = "launches"  # a file for each
RUNNING = "running"  # where the ranks of a launch leave their records
DRAFT = "conditions.draft"


@contextmanager
def claimed(folder: Path, conditions: Mapping[str, Any]) -> Iterator[None]:
    """The folder is this comparison's, and no other process's until the end: new, or begun under the same conditions.

    UsageError names the conditions that differ.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        _lock(lock, folder)
        _claim(folder, json.loads(json.dumps(conditions)))
        yield
    finally:
        os.close(lock)


def looked_at(folder: Path, conditions: Mapping[str, Any]) -> None:
    """UsageError where claimed() would refuse the folder, which stays as it is."""
    if folder.exists():
        _check(folder, json.loads(json.dumps(conditions)))


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"--output {folder}: another dualdist compare is at work there; wait for its end, or name another folder"
        ) from error
    except OSError:
        return  # some network file systems lock no folders


def _claim(folder: Path, conditions: Mapping[str, Any]) -> None:
    if _check(folder, conditions):
        return
    try:
        draft = folder / DRAFT
        draft.write_text(json.dumps(conditions, indent=1))
        draft.replace(folder / CONDITIONS)
    except OSError as error:
        raise _unusable(folder, error) from error


def _check(folder: Path, conditions: Mapping[str, Any]) -> bool:
    """Whether a comparison under these conditions has begun there; UsageError where it was another one, or none."""
    file = folder / CONDITIONS
    try:
        if not file.exists():
            if any(path.name != DRAFT for path in folder.iterdir()):
                raise UsageError(f"--output {folder}: expected a new or empty folder, or one of dualdist compare")
            return False
        before = json.loads(file.read_text())
        if not isinstance(before, dict):
            raise ValueError(f"{CONDITIONS} holds no conditions")
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(folder, error) from error
    differing = [
        f"{name} was {before.get(name)!r} and is {conditions.get(name)!r}"
        for name in {**before, **conditions}
        if before.get(name) != conditions.get(name)
    ]
    if differing:
        raise UsageError(
            f"--output {folder} holds a comparison under other conditions ({'; '.join(differing)}): name another folder"
        )
    return True


def _unusable(folder: Path, error: Exception) -> UsageError:
    return UsageError(f"--output {folder}: cannot be used ({error}); name another folder")


NO_STEPS = "no rank stepped a wrapped optimizer; does the script call dd.wrap_optimizer?\n"


@dataclass(frozen=True)
class UserScript:
    """A program of a user's, what follows `python`."""

    words: tuple[str, ...]
    warmup: int
    steps: int


@dataclass(frozen=True)
class Comparison:
    """What every launch is made from: `work` is a model to be trained, or a script; `folder` keeps what was found."""

    work: TrainOptions | UserScript
    setting: MeasurementSettings
    site: Site
    folder: Path

    def ranks(self, cell: Cell) -> int:
        return 1 if cell.kind == "one" else self.setting.ranks

    def planned(self, cell: Cell, number: int) -> PlannedJob:
        """The job of a round, and the files in which its ranks will leave their records."""
        ranks, own = self.ranks(cell), self.folder / RUNNING / f"{number}-{cell.key}"
        setting = replace(self.setting, ranks=ranks)
        reports = [own / f"rank-{rank}.json" for rank in range(ranks)]
        if isinstance(self.work, UserScript):
            record = {RECORD: str(own), RECORD_WARMUP: str(self.work.warmup), RECORD_STEPS: str(self.work.steps)}
            setting = replace(setting, env={**record, **setting.env})
            built = program_command(cell.config, self.work.words, setting, self.site)
        else:
            built = worker_command(cell.config, self._words(cell, self.work, own), setting, self.site)
            if self._sweeps(cell, self.work):
                reports.append(own / "allreduce.json")
        return PlannedJob(f"round {number + 1}, {cell.label}", built, tuple(reports), {"cell": cell, "folder": own})

    def _batch(self, cell: Cell) -> int | None:
        """Samples of all ranks in a step; one rank alone has as many as each of several."""
        return None if isinstance(self.work, UserScript) else self.work.batch * self.ranks(cell) // self.setting.ranks

    def _words(self, cell: Cell, options: TrainOptions, own: Path) -> list[str]:
        words = {
            "model": options.model,
            "contender": DUALDIST if cell.kind == "one" else cell.kind,
            "batch": self._batch(cell),
            "warmup": options.warmup,
            "steps": options.steps,
            "image-size": options.image_size,
            "seed": options.seed,
            "slow": cell.slow,
            "folder": own,
            "report": own / "allreduce.json",
        }
        if self._sweeps(cell, options):
            words["sizes"] = ",".join(map(str, options.sizes))
        return ["train", *(f"--{name}={value}" for name, value in words.items())]

    def _sweeps(self, cell: Cell, options: TrainOptions) -> bool:
        return bool(options.sizes) and cell.is_contender and self.ranks(cell) > 1

    def launch(self, cell: Cell, number: int) -> Launch:
        """Run the job to its end; a launch that failed says why."""
        planned, began, started = self.planned(cell, number), time.time(), time.monotonic()
        shutil.rmtree(planned.tags["folder"], ignore_errors=True)  # what an interrupted launch has left
        found = Launch(
            cell=cell.key, round=number, began=began, seconds=0, command=planned.command_line, batch=self._batch(cell)
        )
        try:
            reports = run_job(planned, self.setting.timeout_s)
            ranks = [RankRecord.model_validate(report) for report in reports[: self.ranks(cell)]]
            allreduce = reports[-1] if len(reports) > len(ranks) else None
            known = {"ranks": ranks, "allreduce": allreduce, "error": unfit(cell, ranks)}
            foreign = foreign_of(ranks) if cell.config.launcher == "srun" else reports[0][FOREIGN]
            found = found.model_copy(update={**known, "foreign_cores": foreign})
        except LaunchError as error:
            hint = NO_STEPS if isinstance(self.work, UserScript) and "it left no report" in str(error) else ""
            found = found.model_copy(update={"error": hint + str(error)})
        finally:
            shutil.rmtree(planned.tags["folder"], ignore_errors=True)
        found = found.model_copy(update={"seconds": time.monotonic() - started})
        files.write(found, self.folder / LAUNCHES / f"{number:03}-{cell.key}.json")
        return found

    def kept(self, cells: Sequence[Cell]) -> list[Launch]:
        """The launches of an earlier run that was broken off; those that failed are tried again."""
        keys = {cell.key for cell in cells}
        paths = sorted((self.folder / LAUNCHES).glob("*.json"))
        found = [launch for path in paths if (launch := files.read(path)).cell in keys]
        return [launch for launch in found if launch.error is None]


def unfit(cell: Cell, ranks: Sequence[RankRecord]) -> str | None:
    """Why these records cannot be compared, or are not this cell's; None where they can."""
    first, place = ranks[0], cell.config
    if place.backend not in ("auto", first.backend) or place.transport not in (None, first.transport):
        ran, asked = f"{first.backend} over {first.transport}", f"{place.backend} over {place.transport}"
        return f"it ran on {ran}, not on {asked}: does the script name a backend itself? Let it call dd.init()"
    if min(len(rank.steps) for rank in ranks) < 1:
        return f"it took {len(first.ends)} steps, and the first {first.warmup} are not timed: train longer"
    return None

"""The folder of a comparison: what it was made with, so that a run that was broken off goes on with nothing else."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualdist.errors import UsageError

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

"""The folder of a comparison: what it was made with, so that a run that was broken off goes on with nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualdist.errors import UsageError

CONDITIONS = "conditions.json"
LAUNCHES = "launches"  # a file for each
RUNNING = "running"  # where the ranks of a launch leave their records


def claim(folder: Path, conditions: Mapping[str, Any]) -> None:
    """The folder is this comparison's: new, or begun under the same conditions. UsageError names those that differ."""
    conditions = json.loads(json.dumps(conditions))
    file = folder / CONDITIONS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            if any(folder.iterdir()):
                raise UsageError(f"--output {folder}: expected a new or empty folder, or one of dualdist compare")
            file.write_text(json.dumps(conditions, indent=1))
            return
        before = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--output {folder}: cannot be used ({error}); name another folder") from error
    differing = [
        f"{name} was {before.get(name)!r} and is {conditions.get(name)!r}"
        for name in {**before, **conditions}
        if before.get(name) != conditions.get(name)
    ]
    if differing:
        raise UsageError(
            f"--output {folder} holds a comparison under other conditions ({'; '.join(differing)}): name another folder"
        )

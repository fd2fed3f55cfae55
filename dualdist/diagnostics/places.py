"""Where the trace goes; for whoever asks before torch is there."""

from __future__ import annotations

import os
from pathlib import Path

TIMELINE = "DUALDIST_TIMELINE"


def problem_of(path: Path) -> str:
    """Why rank 0, on this host, cannot write the file; "" where it can."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "" if os.access(path.parent, os.W_OK) else f"the folder {path.parent} is not writable"


def part_of(path: Path, rank: int) -> Path:
    """The file of one rank alone."""
    return path.with_stem(f"{path.stem}.rank-{rank}")

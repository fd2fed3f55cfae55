"""Checkpoint files: the content of one, the newest that is found, and bytes with a checksum that matches."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from dualdist.checkpoint.files import EXTRA, FORMAT, METADATA, FileProgress, read_newest, seal


def content(step: int, count: int = 1000) -> dict[str, Any]:
    return {METADATA: {"format": FORMAT}, EXTRA: {"step": step}, "model": {"weight": torch.full((count,), float(step))}}


def found_step(folder: Path, refused: int = 0) -> int:
    """Return the step of the newest valid checkpoint, which must be whole; newer ones were refused."""
    found = read_newest(folder, FileProgress())
    assert found is not None
    assert len(found.refused) == refused
    step = int(found.content[EXTRA]["step"])
    assert found.content["model"]["weight"].unique().tolist() == [step]
    return step


def sealed(data: bytes) -> bytes:
    """Return an archive of torch.save with its checksum."""
    return data[:-2] + seal(hashlib.sha256(data[:-2] + b"\0\0").hexdigest())

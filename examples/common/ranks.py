"""Who speaks, how a program gives up, and whether all ranks agree; in a process without dualdist, too."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import NoReturn

from torch import nn

import dualdist as dd


def is_root() -> bool:
    return not dd.is_initialized() or dd.rank() == 0


def fail(message: str) -> NoReturn:
    """End the program with one line."""
    sys.exit(f"{Path(sys.argv[0]).name}: error: {message}")


def parameter_hash(model: nn.Module) -> str:
    """SHA-256 of all parameters, equal only where every bit is; ends the program where the ranks disagree."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        array = parameter.detach().cpu().numpy()
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    hashes = dd.allgather_object(digest.hexdigest()) if dd.is_initialized() else [digest.hexdigest()]
    if len(set(hashes)) > 1:
        fail(f"the ranks ended with different parameters: {', '.join(hashes)}")
    return hashes[0]

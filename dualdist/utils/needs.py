"""What the ranks of a job need of a host."""

from __future__ import annotations

# Room that operations and the gradients of a common model take in shared memory, for each rank of the host.
ROOM_BYTES = 48 << 20
# Gloo connects every pair of ranks on every line: torch's own, ours for operations and for gradients, and a group's.
LINES = 4
SPARE_FILES = 512


def open_files(size: int) -> int:
    """How many files a rank of a job of so many may have open at once."""
    return LINES * size + SPARE_FILES

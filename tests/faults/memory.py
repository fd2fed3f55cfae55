"""A /dev/shm of a command's own: as small as in a container, and what the command left in it is told."""

from __future__ import annotations

import os
import shutil

import pytest
from harness.installed import lack

SMALL = """
mount -t tmpfs -o size={size} tmpfs /dev/shm || exit 99
"$@"
code=$?
for turn in 1 2 3 4 5 6 7 8 9 10; do  # ranks that the launcher has killed are just ending
    [ "$(df --output=used /dev/shm | tail -1)" -eq 0 ] && break
    sleep 0.2
done
echo "left in memory: $(ls -A /dev/shm | wc -l) names, $(df --output=used /dev/shm | tail -1) KiB"
exit $code
"""


def with_little_memory(size: str, argv: list[str]) -> list[str]:
    """The command, for which /dev/shm is as small as in a container."""
    if shutil.which("unshare") is None:
        lack("unshare", "util-linux")
    if os.geteuid() != 0:
        pytest.skip("a /dev/shm of its own needs root")
    return ["unshare", "--mount", "sh", "-c", SMALL.format(size=size), "sh", *argv]

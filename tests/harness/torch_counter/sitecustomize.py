"""Count this process if it imports torch: append one byte to the file that TEST_TORCH_IMPORTS names.

Python imports a module of this name at start; the tests put this folder on PYTHONPATH of the programs that they start.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder


class _Counter(MetaPathFinder):
    """Find nothing, and notice the first search for torch."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torch":
            sys.meta_path.remove(self)
            with open(self._path, "ab", buffering=0) as file:
                file.write(b".")


if _path := os.environ.get("TEST_TORCH_IMPORTS"):
    sys.meta_path.insert(0, _Counter(_path))

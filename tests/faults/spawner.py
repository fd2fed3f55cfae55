"""Starts two ranks of a program by dd.spawn: python spawner.py PROGRAM BACKEND ARGUMENT..."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import dualdist as dd

if __name__ == "__main__":
    path, backend, *words = sys.argv[1:]
    dd.spawn(importlib.import_module(f"faults.{Path(path).stem}").main, 2, (backend, *words), backend=backend)

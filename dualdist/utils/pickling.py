"""Pickling of functions from scripts and notebooks: cloudpickle if installed, else pickle."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dualdist.errors import UsageError


def choose_pickler(func: Callable[..., Any]) -> ModuleType:
    """Return cloudpickle, or pickle if it is not installed; raise UsageError if `func` needs it."""
    if importlib.util.find_spec("cloudpickle") is not None:
        return importlib.import_module("cloudpickle")
    if getattr(func, "__module__", None) == "__main__":
        raise UsageError(
            f"{func!r} is defined in __main__, which new ranks cannot import: pip install cloudpickle, or define it "
            "in a module"
        )
    return pickle


def dump_exception(error: BaseException) -> bytes | None:
    """Return the pickled exception, or None if it cannot be pickled and loaded."""
    try:
        data = bytes(choose_pickler(type(error)).dumps(error))
        pickle.loads(data)
    except Exception:  # raised by a foreign class
        return None
    return data

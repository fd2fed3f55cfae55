"""Functions of programs and notebooks as bytes: cloudpickle where it is installed, pickle where it is not needed."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dualdist.errors import UsageError


def choose_pickler(func: Callable[..., Any]) -> ModuleType:
    """cloudpickle, whose pickles plain pickle can load; pickle where it is not installed and need not be."""
    if importlib.util.find_spec("cloudpickle") is not None:
        return importlib.import_module("cloudpickle")
    if getattr(func, "__module__", None) == "__main__":
        raise UsageError(
            f"{func!r} is part of the program that runs here, and new ranks cannot import it: pip install cloudpickle, "
            "or define it in a module of its own"
        )
    return pickle


def dump_exception(error: BaseException) -> bytes | None:
    """The exception as bytes from which it can be loaded; None for one that cannot be sent."""
    try:
        data = bytes(choose_pickler(type(error)).dumps(error))
        pickle.loads(data)
    except Exception:  # whatever a foreign class raises when it is pickled
        return None
    return data

"""What differs in the programs that tests start: whole lines are printed at once, torch is counted and imported faster,
and its compiler is imported late.

Python imports a module of this name at start; the tests put this folder on PYTHONPATH.

Ranks share one output, to which Python would write nothing until much later, or each word of a print() by itself.

A process that imports torch appends one byte to the file that TEST_TORCH_IMPORTS names.

While torch is being imported the garbage collector is off, and never looks later at the 250,000 objects that an import
leaves, all of which live until the process ends: a quarter of the processor time of a process that imports torch and
ends. What the program itself makes is collected as everywhere.

The first optimizer that steps imports torch's compiler (`torch._dynamo`), only to tell it which functions it must leave
alone: 2 CPU seconds, as much as torch itself. Here it is imported when anything else of it is used.
"""

import functools
import gc
import importlib
import io
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Count torch, import it without the collector, and replace torch's compiler by `_Compiler`."""

    def __init__(self, counts: str | None) -> None:
        self._counts = counts

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname == "torch" and self._counts:
            with open(self._counts, "ab", buffering=0) as file:
                file.write(b".")
            self._counts = None
        if fullname == "torch":
            return _without_collector(PathFinder.find_spec(fullname))
        if fullname != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        return ModuleSpec(fullname, _Late())


def _without_collector(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return the spec, whose module runs without the collector and is none of its business afterwards."""
    loader: Any = spec and spec.loader
    if loader is None:
        return spec

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        is_on = gc.isenabled()
        gc.disable()
        try:
            loader.exec_module(module)
            gc.freeze()
        finally:
            if is_on:
                gc.enable()

    loader.exec_module = exec_module
    return spec


class _Late(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Compiler(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is loaded where more of it is asked for."""


class _Compiler(ModuleType):
    """What torch's optimizers use of the compiler; any other attribute loads it."""

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as the compiler does where nothing is being compiled."""

    def disable(self, function: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
        @functools.cache
        def disabled() -> Callable[..., Any]:
            return sys.modules[self.__name__].disable(function, recursive, **options)  # type: ignore[no-any-return]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if sys.modules.get(self.__name__) is self else disabled())(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name != "__path__") or self.__name__ not in sys.modules:
            raise AttributeError(name)  # asked of every module, by `inspect` too, or while this one is being made
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__], sys.modules["torch"]._dynamo  # type: ignore[attr-defined]
        return getattr(importlib.import_module(self.__name__), name)


sys.meta_path.insert(0, _Finder(os.environ.get("TEST_TORCH_IMPORTS")))
if isinstance(sys.stdout, io.TextIOWrapper) and not os.environ.get("PYTHONUNBUFFERED"):
    sys.stdout.reconfigure(line_buffering=True)

"""What differs in the programs that tests start: whole lines are printed at once, torch is counted and imported faster,
and some of its parts are imported late.

Python imports a module of this name at start; the tests put this folder on PYTHONPATH.

Ranks share one output, to which Python would write nothing until much later, or each word of a print() by itself.

A process that imports torch appends one byte to the file that TEST_TORCH_IMPORTS names.

While torch is being imported the garbage collector is off, and never looks later at the 250,000 objects that an import
leaves, all of which live until the process ends: a quarter of the processor time of a process that imports torch and
ends. What the program itself makes is collected as everywhere.

The first optimizer that steps imports torch's compiler (`torch._dynamo`), only to tell it which functions it must leave
alone, and the next init_process_group() clears a cache of it: 2 CPU seconds, as much as torch itself. Here it is
imported when anything else of it is used.

A third of torch's own import are functions in Python that tell the shapes of results (`torch._meta_registrations`), for
compilers, fake tensors and DTensor: here they are imported before the first of USES_SHAPES. As this is
private to torch, it is done on the release that it was tried with.

A rank that trains by DistributedDataParallel, without dualdist, waits a moment before it ends, for the reason that
`dualdist exec` waits: torch may abort it.
"""

import atexit
import functools
import gc
import importlib
import io
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
SHAPES = "torch._meta_registrations"
TRIED = "2.13."
USES_SHAPES = ("torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store")


class _Finder(MetaPathFinder):
    """Count torch, import it without the collector, and put `_Compiler` and an empty module for two of its parts."""

    def __init__(self, counts: str | None) -> None:
        self._counts = counts
        self._late = {COMPILER, SHAPES}
        self._empty: set[str] = set()

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname == "torch" and self._counts:
            with open(self._counts, "ab", buffering=0) as file:
                file.write(b".")
            self._counts = None
        if fullname == "torch":
            return _without_collector(PathFinder.find_spec(fullname))
        if fullname in USES_SHAPES and SHAPES in self._empty:
            return self._import_shapes(fullname)
        if fullname == SHAPES and not sys.modules["torch"].__version__.startswith(TRIED):
            self._late.discard(SHAPES)
        if fullname not in self._late:
            return None
        self._late.remove(fullname)
        self._empty.add(fullname)
        return ModuleSpec(fullname, _Late())

    def _import_shapes(self, user: str) -> ModuleSpec:
        """Import them, and with them their user: torch needs this order."""
        self._empty.remove(SHAPES)
        del sys.modules[SHAPES]
        importlib.import_module(SHAPES)
        spec: Any = sys.modules[user].__spec__
        spec.loader = _Loaded(sys.modules[user], spec.loader)
        return spec  # type: ignore[no-any-return]


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
            _allow_generators(module)
            gc.freeze()
        finally:
            if is_on:
                gc.enable()

    loader.exec_module = exec_module
    return spec


def _allow_generators(torch: Any) -> None:
    """Do for torch.Generator what USES_SHAPES do at their end."""
    if torch.__version__.startswith(TRIED):
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)


class _Late(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Compiler(spec.name) if spec.name == COMPILER else ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is loaded where more of it is asked for."""


class _Loaded(Loader):
    """Gives a module that has been imported meanwhile."""

    def __init__(self, module: ModuleType, loader: Any) -> None:
        self._module = module
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing a second time."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader


class _Rules:
    """What init_process_group() uses of the compiler's rules; any other attribute loads them."""

    def clear_lru_cache(self) -> None:
        """Do nothing: nothing has been cached."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{COMPILER}.trace_rules"), name)


class _Compiler(ModuleType):
    """What torch's optimizers and process groups use of the compiler; any other attribute loads it."""

    trace_rules = _Rules()

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


def _let_gloo_end() -> None:
    if "RANK" in os.environ and "torch.distributed" in sys.modules and "dualdist" not in sys.modules:
        time.sleep(0.2)


atexit.register(_let_gloo_end)
sys.meta_path.insert(0, _Finder(os.environ.get("TEST_TORCH_IMPORTS")))
if isinstance(sys.stdout, io.TextIOWrapper) and not os.environ.get("PYTHONUNBUFFERED"):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # torchrun starts `python -u`

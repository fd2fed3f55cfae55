"""The name `horovod` in this process: the installed package, or dualdist's modules under an alias."""

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = "horovod"
# Holds dualdist's package of that name. Multiprocessing's child processes get their parent's sys.path, but none of its
# import hooks: with this folder on sys.path, importing the package installs the alias there.
FOLDER = str(Path(__file__).parents[1] / "hvd" / "named")


class HorovodAlias:
    """An import hook for `horovod` and all names below it.

    `table` maps such names to modules of dualdist: one module object, hence the same classes, under both names. Other
    modules of the alias are files in FOLDER. Names in `absent` are refused. All others are the installed Horovod's.
    """

    def __init__(self, table: Mapping[str, str], absent: Collection[str]) -> None:
        self._table = table
        self._absent = absent
        self._lock = threading.RLock()
        self._is_suspended = False
        self._real: dict[str, ModuleType] = {}

    def install(self) -> None:
        """Install the hook in front. Modules of Horovod that were imported before are kept for real_horovod()."""
        self._real = _pop_modules(except_in=FOLDER)
        if FOLDER not in sys.path:
            sys.path.insert(1, FOLDER)  # behind the script's folder, before the installed packages
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, None for names outside horovod; raise ModuleNotFoundError if there is none.

        Returning None would pass a name below `horovod.torch` to the next finder, which would load FOLDER's file again.
        """
        if self._is_suspended or not is_horovod(fullname):
            return None
        if fullname in self._table:
            name = self._table[fullname]
            found = importlib.util.find_spec(name)
            return found and self._alias_spec(fullname, found, partial(importlib.import_module, name))
        if fullname == ROOT:
            return PathFinder.find_spec(fullname, [FOLDER])
        if self._is_parent(fullname):
            return ModuleSpec(fullname, None, is_package=True)
        return self._real_spec(fullname)

    def _is_parent(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in self._table)

    def _alias_spec(self, fullname: str, found: ModuleSpec, load: Callable[[], ModuleType]) -> ModuleSpec:
        is_package = self._is_parent(fullname) or found.submodule_search_locations is not None
        loader: Any = _AliasLoader(load)  # not an importlib.abc.Loader, whose import takes 4 ms of `import dualdist`
        return ModuleSpec(fullname, loader, origin=found.origin, is_package=is_package)

    def _real_spec(self, fullname: str) -> ModuleSpec:
        submodule = ".".join(fullname.split(".")[:2])
        if submodule in self._absent:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: here {ROOT!r} is dualdist, which has horovod.torch only. Start the "
                "program with plain python, without dualdist.hvd and --as-horovod, to use an installed Horovod",
                name=fullname,
            )

        def load() -> ModuleType:
            with self.suspended():
                return importlib.import_module(fullname)

        found = None
        with self.suspended(), contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec(fullname)
        if found is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: here {ROOT!r} is dualdist, which does not have it, nor does an "
                "installed Horovod (dualdist install-horovod installs one)",
                name=fullname,
            )
        return self._alias_spec(fullname, found, load)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the alias for the block; one thread at a time, reentrant."""
        with self._lock:
            if self._is_suspended:
                yield
                return
            aliased = _pop_modules()
            index = sys.path.index(FOLDER) if FOLDER in sys.path else None
            if index is not None:
                del sys.path[index]
            sys.modules.update(self._real)
            self._is_suspended = True
            try:
                yield
            finally:
                self._is_suspended = False
                self._real = _pop_modules()
                sys.modules.update(aliased)
                if index is not None:
                    sys.path.insert(index, FOLDER)


class _AliasLoader:
    """Returns a module that is imported under another name, unchanged."""

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self._load = load
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._load()
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the alias's spec


def is_horovod(fullname: str) -> bool:
    return fullname == ROOT or fullname.startswith(f"{ROOT}.")


def installed_alias() -> HorovodAlias | None:
    """Return the alias that is installed in this process, if any."""
    return next((finder for finder in sys.meta_path if isinstance(finder, HorovodAlias)), None)


@contextlib.contextmanager
def real_horovod() -> Iterator[None]:
    """Make `import horovod...` in the block find the installed package, even if an alias is installed.

    Its modules are imported once and kept between blocks. Functions of Horovod that import when called must be called
    in a block. Other threads must not import these names meanwhile: they would get the installed package too.
    """
    if installed_alias() is None and FOLDER in sys.path:
        importlib.import_module(ROOT)  # in a child process of a program under the alias
    alias = installed_alias()
    with contextlib.nullcontext() if alias is None else alias.suspended():
        yield


def _pop_modules(except_in: str | None = None) -> dict[str, ModuleType]:
    """Remove Horovod's modules from sys.modules, except those from a folder, and return them."""
    names = [
        name
        for name, module in list(sys.modules.items())
        if is_horovod(name)
        and not (except_in is not None and (getattr(module, "__file__", None) or "").startswith(except_in))
    ]
    return {name: sys.modules.pop(name) for name in names}

"""What the name `horovod` means in this process: the installed package or, under an alias, modules of ours."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = "horovod"
# Holds our package of that name. On sys.path it makes the alias known to child processes, which multiprocessing gives
# their parent's sys.path, but none of its import hooks: importing the package puts the alias in place.
FOLDER = str(Path(__file__).parents[1] / "hvd" / "named")


class HorovodAlias(MetaPathFinder):
    """An import hook that has the last word on `horovod` and all names below it.

    `table` maps such names to modules of ours, which keep their own names too: one module object, hence the same
    classes, whichever name it is imported by. Modules that have no name of their own are files in FOLDER. `absent` are
    refused. Every other name is the installed Horovod's.
    """

    def __init__(self, table: Mapping[str, str], absent: Collection[str]) -> None:
        self._table = table
        self._absent = absent
        self._lock = threading.RLock()
        self._is_aside = False
        self._real: dict[str, ModuleType] = {}

    def install(self) -> None:
        """Put the hook first. Modules of the real Horovod that were imported before are kept for real_horovod()."""
        self._real = _taken_out(but_in=FOLDER)
        if FOLDER not in sys.path:
            sys.path.insert(1, FOLDER)  # behind the script's folder, before the installed packages
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the module comes from; None for names that are not Horovod's, ModuleNotFoundError where it is nowhere.

        None would hand a name below `horovod.torch` to the next finder, which would find our file of that name and
        load it a second time.
        """
        if self._is_aside or not is_horovod(fullname):
            return None
        if fullname in self._table:
            return self._found_as(fullname, self._table[fullname])
        ours = [FOLDER] if path is None else [entry for entry in path if entry.startswith(FOLDER)]
        return PathFinder.find_spec(fullname, ours) or self._found_in_real(fullname)

    def _found_as(self, fullname: str, name: str) -> ModuleSpec | None:
        found = importlib.util.find_spec(name)
        return found and _second_name(fullname, found, lambda: importlib.import_module(name))

    def _found_in_real(self, fullname: str) -> ModuleSpec:
        face = ".".join(fullname.split(".")[:2])
        if face in self._absent:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: here {ROOT!r} is dualdist, which has the torch face only. Start the "
                "program with plain python, without dualdist.hvd and --as-horovod, to use an installed Horovod",
                name=fullname,
            )

        def load() -> ModuleType:
            with self.aside():
                return importlib.import_module(fullname)

        found = None
        with self.aside(), contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec(fullname)
        if found is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: here {ROOT!r} is dualdist, which does not have it; nor was it found in "
                "an installed Horovod (dualdist install-horovod brings one)",
                name=fullname,
            )
        return _second_name(fullname, found, load)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As if the alias had never been installed, for the block; one thread at a time, which may enter again."""
        with self._lock:
            if self._is_aside:
                yield
                return
            ours, place = _taken_out(), _removed_from_path()
            sys.modules.update(self._real)
            self._is_aside = True
            try:
                yield
            finally:
                self._is_aside = False
                self._real = _taken_out()
                sys.modules.update(ours)
                if place is not None:
                    sys.path.insert(place, FOLDER)


class _AliasLoader(Loader):
    """Gives a module that has another name already, and leaves it as it was."""

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self._load = load
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._load()
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # in between the import system has put the second name's there


def _second_name(fullname: str, found: ModuleSpec, load: Callable[[], ModuleType]) -> ModuleSpec:
    is_package = found.submodule_search_locations is not None
    return ModuleSpec(fullname, _AliasLoader(load), origin=found.origin, is_package=is_package)


def is_horovod(fullname: str) -> bool:
    """Whether this is Horovod's package or a module in it."""
    return fullname == ROOT or fullname.startswith(f"{ROOT}.")


def installed_alias() -> HorovodAlias | None:
    """The alias that is in place in this process."""
    return next((finder for finder in sys.meta_path if isinstance(finder, HorovodAlias)), None)


@contextlib.contextmanager
def real_horovod() -> Iterator[None]:
    """In the block `import horovod...` finds the installed package, also while an alias is in place.

    Its modules are imported once and kept from block to block. Functions of Horovod that import when they are called
    must be called in a block; all other code of Horovod runs anywhere. Other threads should import nothing of these
    names meanwhile: they would get the real ones, too.
    """
    if installed_alias() is None and FOLDER in sys.path:
        importlib.import_module(ROOT)  # a child process of a program that runs under the alias
    alias = installed_alias()
    with contextlib.nullcontext() if alias is None else alias.aside():
        yield


def _taken_out(but_in: str | None = None) -> dict[str, ModuleType]:
    """Horovod's names, no longer in sys.modules; those from a folder stay there."""
    names = [
        name
        for name, module in list(sys.modules.items())
        if is_horovod(name)
        and not (but_in is not None and (getattr(module, "__file__", None) or "").startswith(but_in))
    ]
    return {name: sys.modules.pop(name) for name in names}


def _removed_from_path() -> int | None:
    """Where FOLDER was on sys.path; None if it was not."""
    if FOLDER not in sys.path:
        return None
    place = sys.path.index(FOLDER)
    del sys.path[place]
    return place

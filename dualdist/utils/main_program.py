"""Run a script or a module as Python would: as `__main__`, with its own sys.argv and sys.path, in this process."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from dualdist.errors import UsageError


def find_module(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs the module as `python -m` does; UsageError if there is none.

    The working folder must be first on sys.path: finding a module imports its parent packages, whose errors are raised.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except BaseException as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.__main__".startswith(f"{missing}."):
            raise UsageError(f"cannot run the module {name}: {error}") from error
        _hide_own_frames(error)
        raise
    if spec is None or not isinstance(spec.loader, InspectLoader):
        raise UsageError(f"there is no module {name} that can be run")
    return partial(_run, spec.loader, [str(spec.origin), *arguments], str(spec.origin), spec)


def find_script(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs the script as `python path` does; UsageError if there is none."""
    file = str(Path(path).absolute())
    if not Path(path).is_file():
        raise UsageError(f"there is no file {file!r}")
    set_first_folder(str(Path(path).resolve().parent))
    return partial(_run, SourceFileLoader("__main__", file), [path, *arguments], file, None)


def set_first_folder(folder: str) -> None:
    """Put the folder first on sys.path, in place of that of the program by which Python was started."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # python's options -P and -I
        sys.path[0] = folder


def _run(loader: InspectLoader, argv: list[str], file: str, spec: ModuleSpec | None) -> None:
    """Run a program as `__main__`; `spec` is None for a script, as in python."""
    sys.argv = argv
    # Not by runpy, which removes its __main__ when the program ends: pickling at exit needs it.
    module = ModuleType("__main__")
    module.__file__ = file
    module.__loader__ = loader
    module.__spec__ = spec
    module.__package__ = None if spec is None else spec.parent
    sys.modules["__main__"] = module
    try:
        # The loader's get_code() would leave a __pycache__ beside a script.
        code = loader.source_to_code(Path(file).read_bytes(), file) if spec is None else loader.get_code(spec.name)
        assert code is not None
        exec(code, vars(module))
    except BaseException as error:
        _hide_own_frames(error)
        raise


def _hide_own_frames(error: BaseException) -> None:
    """Show an exception that ends the process without the frames of this file and of the import system."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        traceback = traceback.tb_next
    show = sys.excepthook
    sys.excepthook = lambda kind, error, _: show(kind, error.with_traceback(traceback), traceback)

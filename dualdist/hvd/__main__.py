"""`python -m dualdist.hvd script.py ...`: run a program for Horovod; its `import horovod.torch` finds dualdist."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from dualdist.hvd.alias import install

USAGE = """\
usage: python -m dualdist.hvd script.py [argument ...]
       python -m dualdist.hvd -m module [argument ...]

Runs a program that was written for Horovod, as python would, on dualdist: in it `import horovod.torch` finds
dualdist.hvd. Start it under any launcher, e.g. torchrun --nproc-per-node=2 -m dualdist.hvd script.py\
"""
UNUSABLE = 2


@dataclass(frozen=True)
class MainProgram:
    """The program to run as `__main__`; `spec` is None for a script, as in python."""

    compiled: Callable[[], CodeType | None]
    file: str
    loader: Loader
    spec: ModuleSpec | None


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name."""
    match arguments:
        case [] | ["-m"]:
            _give_up(USAGE)
        case ["-h" | "--help", *_]:
            print(USAGE)
            return
    install()  # first, since finding a module imports its parent packages
    match arguments:
        case ["-m", module, *rest]:
            program = _module(module)
            sys.argv = [program.file, *rest]
        case [path, *_]:
            program = _script(path)
            sys.argv = arguments
    _run(program)


def _module(name: str) -> MainProgram:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        _give_up(f"{sys.executable}: cannot run the module {name}: {error}", 1)
    if spec is None or not isinstance(spec.loader, InspectLoader):
        _give_up(f"{sys.executable}: there is no module {name} that can be run", 1)
    return _found(spec.loader, spec)


def _script(path: str) -> MainProgram:
    """Return a script, or a folder or zip archive with a `__main__.py`; its location is put first on sys.path."""
    absolute = str(Path(path).absolute())
    if (importer := pkgutil.get_importer(path)) is not None:
        sys.path[: 0 if _is_path_safe() else 1] = [absolute]
        spec = importer.find_spec("__main__")
        if spec is None or not isinstance(spec.loader, InspectLoader):
            _give_up(f"{sys.executable}: there is no __main__.py in {path!r}", 1)
        return _found(spec.loader, spec)
    if not Path(path).is_file():
        _give_up(f"{sys.executable}: there is no file {absolute!r}\n{USAGE}")
    if not _is_path_safe():
        sys.path[0] = str(Path(path).resolve().parent)  # in place of the working folder, which `python -m` put there
    loader = SourceFileLoader("__main__", absolute)
    # The loader's get_code() would leave a __pycache__ beside the script.
    return MainProgram(lambda: loader.source_to_code(loader.get_data(absolute), absolute), absolute, loader, None)


def _found(loader: InspectLoader, spec: ModuleSpec) -> MainProgram:
    return MainProgram(lambda: loader.get_code(spec.name), str(spec.origin), loader, spec)


def _is_path_safe() -> bool:
    """Return True if python's option -P or -I keeps the program's folder off sys.path."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _run(program: MainProgram) -> None:
    # Not by runpy, which removes its __main__ when the program ends: pickling at exit needs it.
    module = ModuleType("__main__")
    module.__file__ = program.file
    module.__loader__ = program.loader
    module.__spec__ = program.spec
    module.__package__ = None if program.spec is None else program.spec.parent
    sys.modules["__main__"] = module
    try:
        code = program.compiled()
        assert code is not None
        exec(code, vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        _show_only(_after_this_file(error.__traceback__))
        raise


def _after_this_file(traceback: TracebackType | None) -> TracebackType | None:
    """Return the program's frames: from the first outside of this file and of the import system."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        traceback = traceback.tb_next
    return traceback


def _show_only(traceback: TracebackType | None) -> None:
    """Show an exception that ends the process with this traceback, without frames of this file."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = hook


def _give_up(message: str, code: int = UNUSABLE) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m dualdist.hvd script.py ...`: run a program for Horovod; its `import horovod.torch` finds dualdist."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from dualdist.hvd.alias import install

USAGE = """\
usage: python -m dualdist.hvd script.py [argument ...]
       python -m dualdist.hvd -m module [argument ...]

Runs a program that was written for Horovod, as python would, on dualdist: in it `import horovod.torch` finds
dualdist.hvd. Start it under any launcher, e.g. torchrun --nproc-per-node=2 -m dualdist.hvd script.py\
"""
UNUSABLE = 2


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name."""
    match arguments:
        case [] | ["-m"]:
            _give_up(USAGE)
        case ["-h" | "--help", *_]:
            print(USAGE)
            return
    install()  # first, since finding a module imports its parent packages
    if arguments[0] == "-m":
        spec = _find_module(arguments[1])
        sys.argv = [str(spec.origin), *arguments[2:]]
        assert isinstance(spec.loader, InspectLoader)
        _run(spec.loader, str(spec.origin), spec)
    else:
        file = _find_script(arguments[0])
        sys.argv = arguments
        _run(SourceFileLoader("__main__", file), file, None)


def _find_module(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        _give_up(f"{sys.executable}: cannot run the module {name}: {error}", 1)
    if spec is None or not isinstance(spec.loader, InspectLoader):
        _give_up(f"{sys.executable}: there is no module {name} that can be run", 1)
    return spec


def _find_script(path: str) -> str:
    """Return the script's absolute path; its folder is put first on sys.path."""
    absolute = str(Path(path).absolute())
    if not Path(path).is_file():
        _give_up(f"{sys.executable}: there is no file {absolute!r}\n{USAGE}")
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # python's options -P and -I
        sys.path[0] = str(Path(path).resolve().parent)  # in place of the working folder, which `python -m` put there
    return absolute


def _run(loader: InspectLoader, file: str, spec: ModuleSpec | None) -> None:
    """Run a program as `__main__`; `spec` is None for a script, as in python."""
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


def _give_up(message: str, code: int = UNUSABLE) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Errors of ours show the frames of the program, not those of dualdist, unless DUALDIST_DEBUG is set."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dualdist.errors import DualdistError

HOME = f"{Path(__file__).parent.parent}{os.sep}"
DEBUG = "DUALDIST_DEBUG"
HINT = f"{DEBUG}=1 shows the frames inside dualdist, too"


def is_debug(environ: Mapping[str, str]) -> bool:
    """Whether the user wants to see our frames, too."""
    return environ.get(DEBUG, "0") not in ("", "0")


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without our frames, and those of torch that we have called; None where nothing is left."""
    kept, inside, ours = [], False, (HOME, *_folder_of("torch"))
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        inside = inside or file.startswith(HOME)
        if not (inside and file.startswith(ours)):
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(kept):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _folder_of(package: str) -> list[str]:
    return [f"{folder}{os.sep}" for folder in getattr(sys.modules.get(package), "__path__", [])]


def format_own_error(error: BaseException, trace: TracebackType | None) -> str:
    """The error as Python prints it, with the program's frames alone, and without what it was made from."""
    lines = traceback.format_exception(type(error), error, user_frames(trace), chain=False)
    if not lines[0].startswith("Traceback"):  # a program of which no frame is left: `python -m dualdist...`
        lines.insert(0, "Traceback (most recent call last):\n")
    return f"{lines[0]}  ({HINT})\n{''.join(lines[1:])}"


def is_own_error(error: BaseException) -> bool:
    """Whether it was raised on purpose: by dualdist, or by its face of Horovod."""
    return isinstance(error, DualdistError) or type(error).__module__.startswith("dualdist.")


def format_error(error: BaseException, environ: Mapping[str, str]) -> str:
    """What is to be seen of an error in a function that we have called, without our frames unless these are wanted.

    Of a foreign one only those of ours are left out that led to the function: below it, they may be the reason.
    """
    trace = error.__traceback__
    if is_own_error(error) and not is_debug(environ):
        return format_own_error(error, trace)
    while not is_debug(environ) and trace is not None and trace.tb_frame.f_code.co_filename.startswith(HOME):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def install_hooks(environ: Mapping[str, str]) -> None:
    """From now on errors of ours that nobody catches are shown so, unless our frames are wanted; others as before.

    A hook that somebody else has set is left alone. IPython has its own way to show errors, and to be told another.
    """
    if is_debug(environ):
        return
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _shown
    shell = _ipython()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((DualdistError,), _shown_in_ipython)


def _shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_own_error(error):
        sys.stderr.write(format_own_error(error, trace))
        sys.stderr.flush()
    else:
        sys.__excepthook__(kind, error, trace)


def _ipython() -> Any:
    """The IPython in which this process runs, if it does."""
    module = sys.modules.get("IPython")
    get: Callable[[], Any] | None = getattr(module, "get_ipython", None)
    return None if get is None else get()


def _shown_in_ipython(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None, tb_offset: Any = None
) -> None:
    shell.showtraceback((kind, error.with_traceback(None), user_frames(trace)), tb_offset=tb_offset)

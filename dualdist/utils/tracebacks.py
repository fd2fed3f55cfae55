"""Tracebacks of dualdist's errors: without dualdist's frames, unless DUALDIST_DEBUG is set."""

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dualdist.errors import DualdistError, LaunchError

HOME = f"{Path(__file__).parent.parent}{os.sep}"
DEBUG = "DUALDIST_DEBUG"
HINT = f"{DEBUG}=1 shows the frames inside dualdist"


def is_debug(environ: Mapping[str, str]) -> bool:
    return environ.get(DEBUG, "0") not in ("", "0")


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without frames of dualdist, and of torch and contextlib beneath the program's."""
    torch = [f"{folder}{os.sep}" for folder in getattr(sys.modules.get("torch"), "__path__", [])]
    kept, hidden = [], (HOME, *torch, contextlib.__file__)
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(hidden):
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for each in reversed(kept):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def format_own_error(error: BaseException, trace: TracebackType | None) -> str:
    """Return the error as Python prints it, with the program's frames alone and without its cause."""
    lines = traceback.format_exception(type(error), error, user_frames(trace), chain=False)
    if not lines[0].startswith("Traceback"):  # no frames left: `python -m dualdist...`
        lines.insert(0, "Traceback (most recent call last):\n")
    return f"{lines[0]}  ({HINT})\n{''.join(lines[1:])}"


def is_own_error(error: BaseException) -> bool:
    """Return True for dualdist's error classes, including dualdist.hvd's."""
    return isinstance(error, DualdistError) or type(error).__module__.startswith("dualdist.")


def format_error(error: BaseException, environ: Mapping[str, str]) -> str:
    """Return the traceback of an error from a user's function, without dualdist's frames unless debugging.

    For a foreign error, only the frames that led to the function are left out: those below may be the cause.
    """
    trace = error.__traceback__
    if is_own_error(error) and not is_debug(environ):
        return format_own_error(error, trace)
    while not is_debug(environ) and trace is not None and trace.tb_frame.f_code.co_filename.startswith(HOME):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def install_hooks(environ: Mapping[str, str]) -> None:
    """Install hooks that print uncaught errors of dualdist without its frames, unless debugging; also in IPython.

    An excepthook that the program has set is kept.
    """
    if is_debug(environ):
        return
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _excepthook
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), _show_in_ipython)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_own_error(error):
        sys.stderr.write(format_own_error(error, trace))
        sys.stderr.flush()
    else:
        sys.__excepthook__(kind, error, trace)


def _show_in_ipython(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None, tb_offset: Any = None
) -> None:
    if is_own_error(error) or isinstance(error.__cause__, LaunchError):  # of a rank of dd.run
        error, trace = error.with_traceback(None), user_frames(trace)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)

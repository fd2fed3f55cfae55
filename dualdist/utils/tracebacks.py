"""Uncaught errors: dualdist's are shown without its frames, unless DUALDIST_DEBUG is set; torchrun is told of all."""

import atexit
import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from dualdist.errors import DualdistError, LaunchError
from dualdist.utils import torchrun_error_file
from dualdist.utils.variables import RANK_PROCESS

HOME = f"{Path(__file__).parent.parent}{os.sep}"
DEBUG = "DUALDIST_DEBUG"
HINT = f"{DEBUG}=1 shows the frames inside dualdist"
# Exceptions that another rank's end causes.
CONSEQUENCES = re.compile(
    r"^(?:[\w.]*\.)?(?:RankLostError|CollectiveTimeoutError|HorovodInternalError|DistNetworkError|DistBackendError"
    r"|ConnectionResetError|BrokenPipeError)\b"
    r"|^(?:[\w.]*\.)?CollectiveError: .*\brank \d+ gave up: "
    r"|Connection (?:closed|reset) by peer|Connection was likely closed"
)
# A consequence is written to torchrun's file so much later: torchrun counts whole seconds, and it looks for ranks that
# have ended ten times a second. So it has seen the rank that failed, and may have ended this one.
LATER_S = 1.0


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


def is_consequence(text: str) -> bool:
    """Return True if the exception was caused by another rank's end; the stack of that rank may follow it, indented."""
    unindented = [line for line in text.splitlines() if not line[:1].isspace()]
    return any(CONSEQUENCES.search(line) for line in unindented[-3:])


def install_hooks(environ: Mapping[str, str]) -> None:
    """Install hooks that print uncaught errors of dualdist without its frames, unless debugging; also in IPython.

    Under torchrun they write all uncaught errors of a rank to its error file, and none of a process that a rank has
    started. An excepthook that the program has set is kept.
    """
    if RANK_PROCESS in environ:
        environ = {**environ, torchrun_error_file.ERROR_FILE: ""}
    elif environ.get(torchrun_error_file.ERROR_FILE):
        atexit.unregister(_write_last_error)
        atexit.register(_write_last_error, environ)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = partial(_excepthook, environ)
    if is_debug(environ):
        return
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), _show_in_ipython)


def _excepthook(
    environ: Mapping[str, str], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = format_error(error, environ)
    if isinstance(error, Exception) and not _follows_from_another_rank(error):
        _write_error(environ, error, text)
    if is_own_error(error) and not is_debug(environ):
        sys.stderr.write(text)
        sys.stderr.flush()
    else:
        sys.__excepthook__(kind, error, trace)


def _write_last_error(environ: Mapping[str, str]) -> None:
    """Write the error that ends this process to torchrun's file, unless that has been done; for atexit."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and torchrun_error_file.is_wanted(environ):
        if _follows_from_another_rank(error):
            time.sleep(LATER_S)
        _write_error(environ, error, format_error(error, environ))


def _follows_from_another_rank(error: BaseException | None) -> bool:
    """Return True if the error, or one that it is chained to, was caused by another rank's end."""
    while error is not None:
        if is_consequence("".join(traceback.format_exception_only(type(error), error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def _write_error(environ: Mapping[str, str], error: Exception, text: str) -> None:
    torchrun_error_file.write_error(environ, f"{type(error).__name__}: {error}", text)


def _show_in_ipython(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None, tb_offset: Any = None
) -> None:
    if is_own_error(error) or isinstance(error.__cause__, LaunchError):  # raised in a rank of dd.run
        error, trace = error.with_traceback(None), user_frames(trace)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)

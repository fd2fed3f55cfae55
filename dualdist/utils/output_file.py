"""Output files: checked before the work begins, and written in one piece when it is done."""

import os
import sys
from pathlib import Path

from dualdist.errors import UsageError


def check_writable(option: str, where: str | None) -> None:
    """Raise UsageError if the file cannot be written."""
    if where in (None, "-"):
        return
    path = Path(str(where)).resolve()
    if not path.parent.is_dir():
        raise UsageError(f"{option} {where}: there is no folder {path.parent}; name another file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {where}: this cannot be written; name another file")


def write_json(where: str | None, text: str) -> None:
    """Write the text to the file of --json, or to standard output for `-`; None: the option was not given."""
    if where == "-":
        sys.stdout.write(f"{text}\n")
    elif where is not None:
        try:
            Path(where).write_text(f"{text}\n")
        except OSError as error:
            reason = f"cannot write it ({error.strerror})"
            raise UsageError(f"--json {where}: {reason}; name another file, or - for stdout") from error


def find_write_problem(path: Path) -> str:
    """Return the reason why this host cannot write the file, "" if it can."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "" if os.access(path.parent, os.W_OK) else f"the folder {path.parent} is not writable"


def write_atomically(path: Path, text: str) -> None:
    """Write a file in a folder that exists, so that readers see all of it or none."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

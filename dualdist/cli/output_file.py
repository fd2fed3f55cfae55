"""The files that --json and --csv name: checked before the work begins, written when it is done."""

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

"""Missing programs: a skip with the command that installs them; in CI a failure. Environments with fewer packages."""

import os
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

IN_CI = os.environ.get("CI", "").lower() in {"1", "true"}


def lack(what: str, packages: str, install: str = "apt-get install --no-install-recommends") -> NoReturn:
    message = f"{what} not found: {install} {packages}"
    if IN_CI:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def environment(folder: Path, *, without: Sequence[str]) -> Path:
    """Make a virtual environment of this one's packages, as no network brings torch; return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    here = Path(sysconfig.get_path("purelib"))
    there = folder / here.relative_to(sys.prefix)
    for entry in here.iterdir():
        if not any(entry.name.startswith((name, f"__editable__.{name}")) for name in ("dualdist", *without)):
            (there / entry.name).symlink_to(entry)
    return folder / "bin" / "python"

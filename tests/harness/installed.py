"""Missing programs: a skip with the command that installs them; in CI a failure."""

import os
from typing import NoReturn

import pytest

IN_CI = os.environ.get("CI", "").lower() in {"1", "true"}


def lack(what: str, packages: str, install: str = "apt-get install --no-install-recommends") -> NoReturn:
    message = f"{what} not found: {install} {packages}"
    if IN_CI:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)

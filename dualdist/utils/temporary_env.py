"""Environment variables that are set temporarily, for foreign code that reads them once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping


@contextlib.contextmanager
def temporary_variables(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset) for the block, and restore them afterwards."""
    before = {name: environ.get(name) for name in settings}
    try:
        _update(environ, settings)
        yield
    finally:
        _update(environ, before)


def _update(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value

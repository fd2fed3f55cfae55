"""Variables that foreign code reads once, set for so long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping


@contextlib.contextmanager
def temporary_variables(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset) for the block, and put them back as they were."""
    before = {name: environ.get(name) for name in settings}
    try:
        _put(environ, settings)
        yield
    finally:
        _put(environ, before)


def _put(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value

"""Horovod's exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dualdist.errors import BackendError, CollectiveError


class HorovodInternalError(RuntimeError):
    """An operation between ranks failed; elastic training goes back to its last commit. The cause is chained."""


class HostsUpdatedInterrupt(RuntimeError):
    """The job's hosts have changed; with `skip_sync` the states need not be synchronized anew."""

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """What HorovodVersionMismatchError says."""
    return f"built for {name} {version}, but {name} {installed_version} is installed: install it anew"


class HorovodVersionMismatchError(ImportError):
    """A framework is installed in another version than the one that was built for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


@contextlib.contextmanager
def horovods_errors() -> Iterator[None]:
    """Errors of dualdist leave the block as the types that Horovod's callers catch."""
    try:
        yield
    except CollectiveError as error:
        raise HorovodInternalError(str(error)) from error
    except BackendError as error:
        raise ValueError(str(error)) from error

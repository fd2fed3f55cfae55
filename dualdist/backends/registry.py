"""Registered backends by name: how each is started, and what the launcher and the doctor need to know of it.

A backend of another package registers itself under the entry-point group `dualdist.backends`, with its name and a
BackendSpec; a program may also call register() before dd.init(). Nothing here imports torch or a backend's library.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualdist.errors import UsageError
from dualdist.utils.suggest import require_choice

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from dualdist.backends.base import AdoptedGroup, Backend, InitContext
    from dualdist.horovod_build.record import BuildRecord

GROUP = "dualdist.backends"
AUTO, NATIVE, HOROVOD, MPI = "auto", "native", "horovod", "mpi"
SINGLE = "single"  # taken by "auto" for one process without a launcher; not to be asked for
# pyproject.toml declares the same ones; these are found without the package's metadata, as in a source tree.
BUILTIN = {name: f"dualdist.backends.{name}:SPEC" for name in (NATIVE, HOROVOD, MPI, SINGLE)}
CHOICES = (AUTO, NATIVE, HOROVOD, MPI)  # those of choices() that need no search of all installed packages
HOROVOD_LIBRARY = "horovod.torch"
NO_TORCH = "torch is not installed"


@dataclass(frozen=True)
class Availability:
    """Result of looking for a backend in this Python: `reason` says why it is not available.

    The last four fields say how an installed Horovod was built.
    """

    available: bool
    version: str | None
    reason: str
    built_for_torch: str | None = None
    gloo: bool | None = None
    mpi: bool | None = None
    nccl: str | None = None


def _needs_torch(versions: Mapping[str, str | None], record: BuildRecord | None) -> Availability:
    torch = versions["torch"]
    return Availability(torch is not None, torch, "" if torch else NO_TORCH)


@dataclass(frozen=True)
class BackendSpec:
    """Description of a backend.

    `start` connects the ranks after they have met at a store. A backend whose launcher connects them already (MPI)
    has `start_early`, which returns None where it needs the store after all. `adopt` returns a backend over process
    groups that the program has set up, or None if there are none.
    """

    name: str
    start: Callable[[InitContext], Backend]
    transports: tuple[str, ...]  # values of DUALDIST_TRANSPORT that it accepts; short comparisons take the first
    start_early: Callable[[InitContext], Backend | None] = lambda context: None
    adopt: Callable[[InitContext], AdoptedGroup | None] = lambda context: None
    launcher: str = "torchrun"  # chosen by `dualdist run` for remote hosts
    needs_mpi: bool = False  # only a launcher that starts MPI can start several ranks
    library: str = ""  # the Python module beneath it
    availability: Callable[[Mapping[str, str | None], BuildRecord | None], Availability] = _needs_torch
    problem: Callable[[str], str | None] = lambda transport: None  # why it cannot run over a transport; may import it


def register(
    name: str, start: Callable[[InitContext], Backend], transports: tuple[str, ...], **fields: Any
) -> BackendSpec:
    """Make a backend known to dd.init() in this process.

    Args:
        name: what dd.init() and DUALDIST_BACKEND call it.
        start: called on every rank with an InitContext after rendezvous; returns its Backend.
        transports: the names that its Backend.transport may have, the fastest first.
        **fields: the other fields of BackendSpec.

    Returns:
        The description, as get(name) returns it.

    Raises:
        UsageError: the name is taken.
    """
    if name in _registered() or name in _entry_points() or name == AUTO:
        raise UsageError(f"backend {name!r}: there is one of this name already; choose another name")
    return _registered().setdefault(name, BackendSpec(name, start, transports, **fields))


@functools.cache
def _registered() -> dict[str, BackendSpec]:
    """Return the descriptions known so far, which register() and get() add to."""
    return {}


def _builtin_points() -> dict[str, EntryPoint]:
    from importlib.metadata import EntryPoint  # here, as `import dualdist` needs neither

    return {name: EntryPoint(name, value, GROUP) for name, value in BUILTIN.items()}


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    """Return the entry points of the group by name; raise UsageError if two packages use one name."""
    from importlib.metadata import entry_points

    found = _builtin_points()
    for point in entry_points(group=GROUP):
        known = found.setdefault(point.name, point)
        if known.value != point.value:
            raise UsageError(
                f"two installed packages have a backend {point.name!r}: {known.value} and {point.value}; remove one"
            )
    return found


def names() -> tuple[str, ...]:
    """Return the backends that can be asked for, the built-in ones first."""
    return tuple(name for name in {**_entry_points(), **_registered()} if name != SINGLE)


def choices() -> tuple[str, ...]:
    """Return the values of DUALDIST_BACKEND and --backend: "auto" and names()."""
    return (AUTO, *names())


def get(name: str) -> BackendSpec:
    """Return the description of a backend; raise UsageError, with the valid names, for any other name."""
    spec = _registered().get(name)
    if spec is not None:
        return spec
    if name not in BUILTIN:
        require_choice(name, names(), "backend")
    point = (_builtin_points() if name in BUILTIN else _entry_points())[name]
    try:
        loaded = point.load()
    except Exception as error:
        raise UsageError(f"the backend {name!r} ({point.value}) cannot be loaded: {error!r}") from error
    if not isinstance(loaded, BackendSpec) or loaded.name != name:
        raise UsageError(f"the entry point of backend {name!r} ({point.value}) is no BackendSpec of this name")
    return _registered().setdefault(name, loaded)


def find(name: str | None) -> BackendSpec | None:
    """Return the description of a backend; None for None, "auto", unknown names and what cannot be loaded."""
    with contextlib.suppress(UsageError):
        return get(name) if name in CHOICES or name in names() else None
    return None


def uses_library(backend: str | None, library: str) -> bool:
    """Return True if a module such as HOROVOD_LIBRARY is beneath the backend."""
    spec = find(backend)
    return spec is not None and spec.library == library


def backend_transports() -> dict[str, tuple[str, ...]]:
    """Return the transports of each backend in names() that can be loaded."""
    return {spec.name: spec.transports for spec in map(find, names()) if spec is not None}


def transports() -> tuple[str, ...]:
    """Return the transports of all backends, each once."""
    return tuple(dict.fromkeys(itertools.chain(*backend_transports().values())))


def needs_mpi(backend: str | None, transport: str | None) -> bool:
    """Return True if only a launcher that starts MPI can start ranks of this backend or transport."""
    spec = find(backend)
    return transport == "mpi" or (spec is not None and spec.needs_mpi)


def availability(versions: Mapping[str, str | None], record: BuildRecord | None) -> dict[str, Availability]:
    """Return the availability of every backend, from the installed versions and the build of an installed Horovod."""
    found = {SINGLE: _needs_torch(versions, record)}
    for name in names():
        try:
            found[name] = get(name).availability(versions, record)
        except UsageError as error:
            found[name] = Availability(False, None, str(error))
    return found

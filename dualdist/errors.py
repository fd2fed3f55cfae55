"""Every exception that dualdist raises on purpose.

    DualdistError
    ├── UsageError               a call that cannot be right: bad argument, wrong order of calls
    │   ├── NotInitializedError      a collective before init() or after shutdown()
    │   └── AlreadyInitializedError  a second init()
    ├── TopologyError            the launcher's variables are incomplete, impossible or contradict each other
    ├── BackendError             the chosen backend cannot be used here
    │   ├── BackendUnavailableError  not installed, not built for this torch, or not built with what was asked
    │   └── UnsupportedError         the backend is fine, but this launcher, dtype or operation is not for it
    ├── RendezvousError          the ranks did not find each other
    ├── CollectiveError          an operation between ranks failed
    │   ├── CollectiveTimeoutError   a rank did not arrive in time
    │   ├── RankLostError            a rank ended or its connection broke
    │   └── MismatchError            the ranks passed arguments that do not fit together
    ├── TrainingError            the training has gone wrong, which every rank is told alike, and the ranks stay in step
    │   ├── DriftError               the ranks hold different parameters
    │   └── NonFiniteError           gradients are NaN or infinite
    ├── CheckpointError          a checkpoint cannot be written or read, or does not fit the program
    ├── BuildError               install-horovod could not build or verify Horovod
    ├── LaunchError              ranks could not be started, or one of them failed
    └── TorchvisionError         torchvision is missing, or does not fit the installed torch

Every message says what was seen, what was expected and what to type. Programs may catch DualdistError for all of them.
"""

from __future__ import annotations


class DualdistError(Exception):
    """The root of all errors that dualdist raises on purpose."""

    names_operation = False  # the message says already which operation between ranks failed


class UsageError(DualdistError, ValueError):
    """A call that cannot be right, whatever the other ranks do."""


class NotInitializedError(UsageError):
    """dualdist was used before init() or after shutdown()."""


class AlreadyInitializedError(UsageError):
    """init() was called while a session is open."""


class TopologyError(DualdistError):
    """The launcher's variables are incomplete, impossible, or contradict each other."""


class BackendError(DualdistError):
    """The chosen backend cannot be used here."""


class BackendUnavailableError(BackendError):
    """The backend is not installed, is built for another torch, or lacks what was asked of it."""


class UnsupportedError(BackendError):
    """The backend works, but not with this launcher, dtype or operation."""


class RendezvousError(DualdistError):
    """The ranks did not find each other."""


class CollectiveError(DualdistError):
    """An operation between ranks failed."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not arrive at a collective operation in time."""


class RankLostError(CollectiveError):
    """Another rank ended, or the connection to it broke, during a collective operation; `ranks` where that is known."""

    ranks: tuple[int, ...] = ()


class MismatchError(CollectiveError):
    """The ranks passed arguments that do not fit together."""


class TrainingError(DualdistError):
    """The training has gone wrong; the ranks have all seen it, and can go on together."""


class DriftError(TrainingError):
    """The ranks hold different values of what should be the same on all of them."""


class NonFiniteError(TrainingError):
    """Gradients that an optimizer was about to use are NaN or infinite."""


class CheckpointError(DualdistError):
    """A checkpoint cannot be written or read, or does not fit what it is loaded into."""


class BuildError(DualdistError):
    """install-horovod could not download, adapt, build, install or verify Horovod."""


class LaunchError(DualdistError, RuntimeError):
    """Ranks could not be started, or one of them failed; `exception` is its pickled exception, where it has one."""

    exception: bytes | None = None


class TorchvisionError(DualdistError, ImportError):
    """torchvision is not installed, or does not work with the installed torch."""

"""The exceptions that dualdist raises.

    DualdistError
    ├── UsageError                   an invalid argument, or calls in the wrong order
    │   ├── NotInitializedError          a call before init(), after shutdown(), or in a child forked from a rank
    │   └── AlreadyInitializedError      a second init()
    ├── TopologyError                the launcher's variables are incomplete, impossible or contradictory
    ├── BackendError                 the chosen backend cannot be used here
    │   ├── BackendUnavailableError      not installed, built for another torch, or lacking a requested feature
    │   └── UnsupportedError             not supported with this launcher, dtype or operation
    ├── RendezvousError              the ranks did not find each other
    ├── CollectiveError              a collective operation failed
    │   ├── CollectiveTimeoutError       a rank did not arrive in time
    │   ├── RankLostError                a rank ended or its connection broke
    │   └── MismatchError                the ranks passed arguments that do not fit together
    ├── TrainingError                the training has gone wrong; raised on every rank, and the ranks remain in step
    │   ├── DriftError                   the ranks hold different parameters
    │   └── NonFiniteError               gradients are NaN or infinite
    ├── CheckpointError              a checkpoint cannot be written or read, or does not fit the program
    ├── BuildError                   install-horovod could not build or verify Horovod
    ├── LaunchError                  ranks could not be started, or one of them failed
    └── TorchvisionError             torchvision is missing, or does not fit the installed torch

Every message states what was found, what was expected and what to do. Catch DualdistError for all of them.
"""


class DualdistError(Exception):
    """The base class of all dualdist exceptions."""

    names_operation = False  # the message already names the failed operation


class UsageError(DualdistError, ValueError):
    """A call is invalid whatever the other ranks do: a bad argument, or calls in the wrong order."""


CLOSED = "this group has been closed: by dd.shutdown(), or by dd.remove_group()"


class NotInitializedError(UsageError):
    """dualdist was used before init(), after shutdown(), or in a child that was forked after init()."""


class AlreadyInitializedError(UsageError):
    """init() was called while a session is open."""


class TopologyError(DualdistError):
    """The launcher's variables are incomplete, impossible, or contradict each other."""


class BackendError(DualdistError):
    """The chosen backend cannot be used here."""


class BackendUnavailableError(BackendError):
    """The backend is not installed, is built for another torch, or lacks a requested feature."""


class UnsupportedError(BackendError):
    """The backend works, but not with this launcher, dtype or operation."""


class RendezvousError(DualdistError):
    """The ranks did not find each other."""


class CollectiveError(DualdistError):
    """A collective operation failed; the ranks may be out of step, and further operations are refused.

    Restart the job, or call shutdown() and init() on every rank.
    """


class CollectiveTimeoutError(CollectiveError):
    """A rank did not arrive at a collective operation within the timeout_s of init()."""

    # Made by backends.base.timeout_error(); Monitor.describe() adds who is missing, of which RankProbe asks all ranks.


class RankLostError(CollectiveError):
    """Another rank ended, or the connection to it broke, during a collective operation.

    Attributes:
        ranks: the ranks that were lost, or () if unknown.
    """

    ranks: tuple[int, ...] = ()


class MismatchError(CollectiveError):
    """The ranks passed arguments that do not fit together; raised on every rank, and the ranks remain in step."""


class TrainingError(DualdistError):
    """The training has gone wrong; raised on every rank, and the ranks remain in step."""


class DriftError(TrainingError):
    """The ranks hold different values of parameters that should be equal."""


class NonFiniteError(TrainingError):
    """Gradients that an optimizer was about to apply are NaN or infinite."""


class CheckpointError(DualdistError):
    """A checkpoint cannot be written or read, or does not fit the objects that it is loaded into."""


class BuildError(DualdistError):
    """install-horovod could not download, patch, build, install or verify Horovod."""


class LaunchError(DualdistError, RuntimeError):
    """Ranks could not be started, or one of them failed.

    Attributes:
        exception: the failed rank's pickled exception, or None if it left none.
    """

    exception: bytes | None = None


class TorchvisionError(DualdistError, ImportError):
    """torchvision is not installed, or does not work with the installed torch."""

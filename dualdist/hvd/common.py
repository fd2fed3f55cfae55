"""Horovod's exceptions, and the helpers of horovod.common.util and horovod.runner.util.threads that programs use."""

import contextlib
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dualdist import session
from dualdist.errors import BackendError, CollectiveError, UsageError
from dualdist.utils import accelerator
from dualdist.utils.variables import temporary_variables

EXTENSIONS = ["torch"]


class HorovodInternalError(RuntimeError):
    """A collective failed; elastic training returns to its last commit. The cause is chained."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed.

    Args:
        skip_sync: the states need no synchronization.
    """

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync


@contextlib.contextmanager
def horovods_errors() -> Iterator[None]:
    """Raise dualdist's errors as the types that Horovod's callers catch; a context manager and a decorator."""
    try:
        yield
    except CollectiveError as error:
        raise HorovodInternalError(str(error)) from error
    except BackendError as error:
        raise ValueError(str(error)) from error


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True for "torch", the only framework here."""
    return ext_base_name in EXTENSIONS


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless `ext_name` is "torch" or "horovod.torch"."""
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(f"{ext_name}: dualdist has horovod.torch only")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True if this process has a GPU."""
    return extension_available(ext_base_name) and accelerator.kind() is not None


def mpi_built(verbose: bool = False) -> bool:
    """Return True if the backend in use, or native before hvd.init(), has MPI."""
    return bool(session.built_with()["mpi"])


def gloo_built(verbose: bool = False) -> bool:
    """Return True if the backend in use, or native before hvd.init(), has Gloo."""
    return bool(session.built_with()["gloo"])


def nccl_built(verbose: bool = False) -> int:
    """Return the version of the NCCL that the backend in use has, such as 21805, or 0."""
    return session.built_with()["nccl"]


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL is not supported."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False: Intel's oneCCL is not supported."""
    return False


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741 (the name is part of the interface)
    """Return n slices of nearly the same length, in order; the first ones take the remainder."""
    each, over = divmod(len(l), n)
    starts = [part * each + min(part, over) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(starts)]


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """Return a context in which these environment variables are set, but for those given as None."""
    return temporary_variables(os.environ, {name: value for name, value in kwargs.items() if value is not None})


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return the function that combines `op` and the deprecated `average`; `reduce_ops` has Average and Sum."""

    def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
        """Return the op meant by `op`, or by the deprecated `average`; raise ValueError if both are given."""
        if op is not None and average is not None:
            raise UsageError("op and average were given: leave average out, op says it all")
        if average is not None:
            message = "average=... is deprecated in Horovod: pass op=Average or op=Sum"
            warnings.warn(message, DeprecationWarning, stacklevel=6)  # beyond the helpers of mpi_ops
        if op is not None:
            return op
        return int(reduce_ops.Sum if average is not None and not average else reduce_ops.Average)

    return handle_average_backwards_compatibility


def in_thread(
    target: Callable[..., object],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that runs target(*args), and return it; a silent one ignores exceptions."""
    if not isinstance(args, tuple):
        raise ValueError(f"args={args!r}: expected a tuple")

    def run() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread

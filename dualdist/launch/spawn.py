"""spawn() and run(): start ranks from a program, as processes of this host."""

import importlib
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dualdist.environments.outer_job import outer_job_variables
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.job import BACKEND_VARIABLE
from dualdist.launch.launchers.spawn import topology_variables
from dualdist.utils import tracebacks
from dualdist.utils.machine import usable_cores
from dualdist.utils.suggest import explain_calls
from dualdist.utils.variables import SPAWN_RENDEZVOUS, THREADS, temporary_variables

T = TypeVar("T")

# Seconds for the other ranks to end after one has failed, before they are killed.
GRACE_S = 5.0
# Seconds to wait for the rank that failed first, after one that failed because of it.
CAUSE_S = 1.0
# The exit code of a rank that would start ranks itself, as it imports a main module without a guard.
UNGUARDED = 113


@explain_calls
def spawn(fn: Callable[..., T], nprocs: int, args: Sequence[Any] = (), backend: str | None = None) -> list[T]:
    """Run fn(*args) on `nprocs` new ranks, processes of this host, and wait for all of them.

    `fn` calls dd.init() itself, as under any launcher. fn, args and results are pickled: define fn at the top of a
    module, and guard the caller with `if __name__ == "__main__"`. Each rank gets its part
    of this host's cores as threads, unless OMP_NUM_THREADS is set.

    Args:
        fn: the function that each rank calls.
        nprocs: the number of ranks.
        args: the arguments of fn.
        backend: the default backend of dd.init() on the ranks.

    Returns:
        The results of fn, in rank order.

    Raises:
        LaunchError: a rank failed; the message has its rank and traceback. The other ranks are ended.
        UsageError: the caller is not guarded, or an argument is invalid.
    """
    return spawn_without_main(fn, nprocs, args, backend=backend, imports_main=True)


def spawn_without_main(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    imports_main: bool = False,
) -> list[T]:
    """Do as spawn(), but do not import the caller's main module on the ranks: it needs no guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing asks itself
        raise SystemExit(UNGUARDED)
    tracebacks.install_hooks(os.environ)
    if nprocs < 1:
        raise UsageError(f"nprocs={nprocs}: expected the number of ranks, 1 or more")
    env = {**(env or {}), **({} if backend is None else {BACKEND_VARIABLE: backend})}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dualdist-") as folder:
        rendezvous = str(Path(folder) / "rank0")
        # A rank imports torch before it runs fn.
        own = env.get(THREADS) or os.environ.get(THREADS)
        threads = own or str(max(1, usable_cores() // nprocs))
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(nprocs):
                receiver, sender = context.Pipe(duplex=False)
                variables = {**env, **topology_variables(rank, nprocs, rank, nprocs), SPAWN_RENDEZVOUS: rendezvous}
                process: BaseProcess = context.Process(target=_run, args=(fn, tuple(args), variables, sender))
                hidden = nullcontext() if imports_main else _without_main()
                with hidden, temporary_variables(os.environ, {THREADS: threads}):
                    process.start()
                sender.close()
                ranks.append((process, receiver))
            return _results(ranks)
        finally:
            for process, receiver in ranks:
                _end(process)
                receiver.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module from multiprocessing, which would have the new process import it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run(fn: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str], sender: Connection) -> None:
    """Run fn on a rank, and send (True, result), or (False, (traceback, exception))."""
    for name in outer_job_variables(os.environ):
        del os.environ[name]
    os.environ.update(variables)
    try:
        result = (True, fn(*args))
        payload = pickle.dumps(result)
    except BaseException as error:
        sender.send((False, (tracebacks.format_error(error, os.environ), dump_exception(error))))
        raise SystemExit(1) from error
    sender.send_bytes(payload)


def _results(ranks: Sequence[tuple[BaseProcess, Connection]]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[LaunchError] = []
    receivers = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while receivers:
        # The consequence of a failure may arrive before its cause: wait for that a moment longer.
        ready = wait(list(receivers), CAUSE_S if failures else None)
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = receivers.pop(receiver)
            try:
                succeeded, value = receiver.recv()
            except EOFError:
                process = ranks[rank][0]
                process.join(GRACE_S)
                if process.exitcode == UNGUARDED:
                    main = os.path.basename(getattr(sys.modules["__main__"], "__file__", "the main module"))
                    raise UsageError(
                        f"the ranks of dd.spawn import {main}, which calls dd.spawn again: put that call under "
                        '`if __name__ == "__main__":`, or use dd.run'
                    ) from None
                ended = f"exit code {process.exitcode}; a negative one is a signal"
                failures.append(LaunchError(f"rank {rank} ended without a result ({ended})"))
                continue
            if succeeded:
                results[rank] = value
            else:
                failures.append(LaunchError(f"rank {rank} failed:\n{value[0]}"))
                failures[-1].exception = value[1]
        if failures and not (ready and all(tracebacks.is_consequence(str(failure)) for failure in failures)):
            break
    if failures:
        raise min(failures, key=lambda failure: tracebacks.is_consequence(str(failure)))
    for process, _ in ranks:
        process.join()
    return [results[rank] for rank in range(len(ranks))]


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        process.terminate()
        process.join(GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


@explain_calls
def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Run fn(*args, **kwargs) on `np` new ranks of this host, as dd.spawn does, for interactive work.

    `fn` may be defined in a notebook or in the program itself, which needs no guard, and may be a lambda or a closure
    (pip install cloudpickle). It calls dd.init() itself.

    Args:
        fn: the function that each rank calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: the number of ranks.
        backend: the default backend of dd.init() on the ranks.
        env: environment variables of every rank.

    Returns:
        The results of fn, in rank order.

    Raises:
        Exception: that of the rank that failed first, from a LaunchError with its rank and traceback.
        LaunchError: a rank failed, and its exception cannot be pickled.
    """
    payload = choose_pickler(fn).dumps((fn, tuple(args), dict(kwargs or {})))
    try:
        results = spawn_without_main(call_pickled, np, (payload,), backend=backend, env=env)
    except LaunchError as failure:
        if failure.exception is None:
            raise
        raise pickle.loads(failure.exception) from failure.with_traceback(None)
    return [pickle.loads(result) for result in results]


def call_pickled(payload: bytes) -> bytes:
    """Run the pickled call on a rank; its result is pickled here, as it may need cloudpickle."""
    fn, args, kwargs = pickle.loads(payload)
    return bytes(choose_pickler(fn).dumps(fn(*args, **kwargs)))


def choose_pickler(func: Callable[..., Any]) -> ModuleType:
    """Return cloudpickle, or pickle if it is not installed; raise UsageError if `func` needs it."""
    if importlib.util.find_spec("cloudpickle") is not None:
        return importlib.import_module("cloudpickle")
    if getattr(func, "__module__", None) == "__main__":
        raise UsageError(
            f"{func!r} is defined in __main__, which new ranks cannot import: pip install cloudpickle, or define it "
            "in a module"
        )
    return pickle


def dump_exception(error: BaseException) -> bytes | None:
    """Return the pickled exception, or None if it cannot be pickled and loaded."""
    try:
        data = bytes(choose_pickler(type(error)).dumps(error))
        pickle.loads(data)
    except Exception:  # raised by a foreign class
        return None
    return data

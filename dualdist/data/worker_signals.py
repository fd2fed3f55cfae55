"""Signals of preemption in the worker processes of a DataLoader: they are for the rank, and workers ignore them."""

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Collection, Iterator
from typing import Any

from dualdist.utils.variables import PREEMPTION_SIGNALS

POLL_S = 1.0


def unhandled_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that this process takes as requests, or that would kill it; the program handles the others."""
    handlers = {number: signal.getsignal(number) for number in PREEMPTION_SIGNALS}
    return tuple(
        number
        for number, handler in handlers.items()
        if handler == signal.SIG_DFL or getattr(handler, "requests_stop", False)
    )


@contextlib.contextmanager
def block_signals(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Block the signals in processes started in the block; this process gets them afterwards.

    The processes must call exit_with_parent(), or only SIGKILL ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_with_parent(numbers: Collection[signal.Signals]) -> None:
    """Exit on the signals if the parent sends them, and when the parent exits; ignore them from other senders.

    torch's DataLoader workers also exit with their parent, but end the rank if another process sends the signal.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not numbers:
        return
    started_by = os.getppid()  # not the parent if forked by multiprocessing's server, which may outlive it

    def exit_on_signal() -> None:
        # In a forked process is_alive() stays True while later siblings run.
        while parent.is_alive() and os.getppid() == started_by:
            received = signal.sigtimedwait(numbers, POLL_S)
            if received is not None and received.si_pid == parent.pid:
                break
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # this thread's mask, which threads that it starts inherit
    _unblock_in_children(numbers)
    threading.Thread(target=exit_on_signal, name="dualdist-notices", daemon=True).start()


def _unblock_in_children(numbers: Collection[signal.Signals]) -> None:
    """Unblock the signals in programs and processes that this process starts; they would inherit the mask.

    While this process starts a program, a signal from any sender ends it.
    """
    popen: Any = subprocess.Popen
    execute = popen._execute_child

    @functools.wraps(execute)
    def execute_unblocked(*args: Any, **options: Any) -> None:
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        try:
            execute(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    popen._execute_child = execute_unblocked
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers))

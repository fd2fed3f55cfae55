"""Environment variables of dualdist, and the signals and the exit status of a preempted job.

Ranks, launchers and job scripts agree on these.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, MutableMapping

from dualdist.utils.suggest import did_you_mean

PREFIX = "DUALDIST_"
# How `dualdist run` shows what a rank writes: "tagged" with its rank, or on a "terminal".
OUTPUT = "DUALDIST_OUTPUT"
# Names a file whose creation preempts the job; rank 0 and `dualdist run` poll for it.
NOTICE = "DUALDIST_NOTICE"
# Set by `dualdist run --min-ranks`: the number of the place at which the program runs, whatever its rank.
PLACE = "DUALDIST_PLACE"
# Suffix of a file that rank 0 creates once the job has stopped, since some launchers lose the exit status.
DONE = ".done"
# Threads of torch and other libraries: the cores of a host divided by its ranks, unless the user has set it.
THREADS = "OMP_NUM_THREADS"
# The backend that init_process_group() gets in place of gloo, mpi and, without a GPU, nccl.
TORCH_BACKEND = "DUALDIST_TORCH_BACKEND"
# Set in a rank by dd.init(), for the processes that it starts: dualdist/liveness/joined_rank.py.
RANK_PROCESS = "DUALDIST_RANK_PROCESS"
# Set for the ranks of dd.spawn: the file by which they meet.
SPAWN_RENDEZVOUS = "DUALDIST_SPAWN_RENDEZVOUS"
# Names the file of the timeline.
TIMELINE = "DUALDIST_TIMELINE"
# Set by `dualdist compare` for a program that it times: a folder, the warm-up steps and the steps to time.
RECORD, RECORD_WARMUP, RECORD_STEPS = "DUALDIST_RECORD", "DUALDIST_RECORD_WARMUP", "DUALDIST_RECORD_STEPS"
# Signals that preempt a rank: sent by schedulers before they reclaim a machine, and by Slurm on request.
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Exit status of a preempted job that can be requeued: EX_TEMPFAIL of sysexits.h, "try again".
REQUEUE = 75

_NAMES = """
    ADDRESS BACKEND DEBUG EXEC JOB LAUNCHER LOCAL_RANK LOCAL_SIZE NODE_RANK NOTICE NO_EXTENSION NUM_NODES OBSERVERS
    OUTPUT PLACE PORT RANK RANK_PROCESS RECORD RECORD_STEPS RECORD_WARMUP REDUCTION RENDEZVOUS RENDEZVOUS_DIR RUN
    RUN_FRAMES RUN_RENDEZVOUS RUN_RESTART SIZE SLOW_RANKS SPAWN_RENDEZVOUS TIMELINE TORCH_BACKEND TRANSPORT
"""
NAMES = tuple(PREFIX + name for name in _NAMES.split())


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that is set and has no meaning for dualdist."""
    found = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in NAMES:
            nearest = did_you_mean(name.removeprefix(PREFIX), _NAMES.split())  # with the prefix any two are alike
            hint = nearest.replace("'", f"'{PREFIX}", 1)
            found.append(f"{name} is set, but no variable of dualdist{hint}")
    return found


@contextlib.contextmanager
def temporary_variables(environ: MutableMapping[str, str], settings: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset) for the block, and restore them afterwards: for foreign code that reads them once."""
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

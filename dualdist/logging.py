"""What a rank says: a line on one rank alone, logs that name the rank, what it runs on."""

from __future__ import annotations

import builtins
import logging
from typing import TextIO

from dualdist import session
from dualdist.errors import UsageError

LOG_FORMAT = "%(asctime)s [%(rank)s] %(levelname)s %(name)s: %(message)s"


def print(*values: object, rank: int | None = 0, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
    """Print on one rank alone, or with rank=None on all of them, each line with its rank before it; not buffered.

    >>> dd.print("the loss is", 0.5)
    the loss is 0.5
    >>> dd.print("here", rank=None)
    [0] here
    """
    topology = session.current().topology
    if rank is not None and not 0 <= rank < topology.size:
        raise UsageError(f"rank={rank}: expected a rank of this job, 0 to {topology.size - 1}, or None for all")
    if rank not in (None, topology.rank):
        return
    if rank is None:
        text = sep.join(map(str, values))
        # In one piece: several ranks may write to one terminal.
        values = ("\n".join(f"[{topology.rank}] {line}" for line in text.split("\n")),)
    builtins.print(*values, sep=sep, end=end, file=file, flush=True)


def info() -> str:
    """In one line, what this rank is and what it runs on.

    >>> dd.info().startswith("rank 0 of 1 (local rank 0 of 1, node 0 of 1), single over none, started by none, ")
    True
    """
    here = session.current()
    topology, backend = here.topology, here.backend
    return (
        f"rank {topology.rank} of {topology.size} (local rank {topology.local_rank} of {topology.local_size}, node "
        f"{topology.node_rank} of {topology.num_nodes}), {backend.name} over {backend.transport}, started by "
        f"{topology.launcher}, {here.device}"
    )


def setup_logging(
    level: int | str = logging.INFO, *, others: int | str = logging.WARNING, format: str = LOG_FORMAT
) -> None:
    """Python's root logger writes to standard error, each line with the rank: all of `level` on rank 0, and on the
    other ranks what reaches `others`. It may be called before init(); handlers of an earlier call are replaced.
    """
    handler = logging.StreamHandler()
    handler.addFilter(_RankFilter(level, others))
    handler.setFormatter(logging.Formatter(format))
    root = logging.getLogger()
    for old in [each for each in root.handlers if any(isinstance(one, _RankFilter) for one in each.filters)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(min(_number(level), _number(others)))


class _RankFilter(logging.Filter):
    """Gives records a rank, "2/8", and lets through what this rank shall say."""

    def __init__(self, level: int | str, others: int | str) -> None:
        super().__init__()
        self._levels = _number(level), _number(others)

    def filter(self, record: logging.LogRecord) -> bool:
        rank, size = session.rank_and_size()
        record.rank = f"{rank}/{size}"
        return record.levelno >= self._levels[0 if rank == 0 else 1]


def _number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise UsageError(f"level {level!r}: expected one of Python's logging, as 'INFO' or logging.INFO")
    return number

"""Print, log and show progress by rank."""

import builtins
import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

from dualdist import session
from dualdist.errors import UsageError

T = TypeVar("T")

LOG_FORMAT = "%(asctime)s [%(rank)s] %(levelname)s %(name)s: %(message)s"
HANDLER = "dualdist.setup_logging"  # no name that a program gives to a handler of its own
BAR_CELLS = 20
# Seconds between two updates of a progress bar on a terminal, and between two lines in a file.
DRAW_S, LINE_S = 0.1, 60.0


def print(*values: object, rank: int | None = 0, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
    """Print on one rank, or on all ranks with each line prefixed by the rank; flushes.

    Under `dualdist run --tag-output`, which prefixes every line, no prefix is added.

    Args:
        *values: as for the built-in print.
        rank: the rank that prints, or None for all.
        sep: as for the built-in print.
        end: as for the built-in print.
        file: a text stream; standard output if None.

    Raises:
        UsageError: there is no such rank.

    Example:
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
    text = sep.join(map(str, values))
    if rank is None and session.output_mode() != "tagged":
        text = "\n".join(f"[{topology.rank}] {line}" for line in text.split("\n"))
    # One write: ranks share a terminal, and mpirun tags each piece that an unbuffered rank writes.
    builtins.print(text + end, end="", file=file, flush=True)


def info() -> str:
    """Return one line with this rank, its node, backend, transport, launcher and device.

    Example:
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
    """Configure Python's root logger to write to standard error with the rank in each line.

    May be called before init(), and again to replace the configuration.

    Args:
        level: the lowest level shown on rank 0, such as "INFO" or logging.INFO.
        others: the lowest level shown on the other ranks.
        format: a logging format; `%(rank)s` is the rank and the size, such as 2/8.

    Raises:
        UsageError: a level is unknown.
    """
    of_root = _level_number(level)
    of_others = _level_number(others)

    def is_shown(record: logging.LogRecord) -> bool:
        rank, size = session.rank_and_size()
        record.rank = f"{rank}/{size}"
        return record.levelno >= (of_root if rank == 0 else of_others)

    root = logging.getLogger()
    for old in list(root.handlers):
        if old.name == HANDLER:
            root.removeHandler(old)
    handler = logging.StreamHandler()
    handler.name = HANDLER
    handler.addFilter(is_shown)
    handler.setFormatter(logging.Formatter(format))
    root.addHandler(handler)
    root.setLevel(min(of_root, of_others))


def _level_number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise UsageError(f"level {level!r}: expected one of Python's logging, such as 'INFO' or logging.INFO")
    return number


def progress(items: Iterable[T], description: str = "", *, total: int | None = None) -> Iterator[T]:
    """Iterate over `items`, showing the progress on rank 0's standard error.

    On a terminal, also that of `dualdist run`, this is a bar; elsewhere one line a minute, and one at the end.

    Args:
        items: what to iterate over.
        description: shown before the progress.
        total: the number of items; len(items) if None and available.

    Yields:
        The items.

    Example:
        >>> sum(dd.progress([1, 2, 3], "epoch 1"))
        6
    """
    if total is None:
        with contextlib.suppress(TypeError):  # a loader of an iterable data set has a __len__ that raises it
            total = len(items)  # type: ignore[arg-type]
    if session.rank_and_size()[0] != 0 or sys.stderr is None:
        yield from items
        return
    out = sys.stderr
    is_terminal = out.isatty() or session.output_mode() == "terminal"
    pause_s = DRAW_S if is_terminal else LINE_S
    done = width = 0
    began = drawn_at = time.monotonic()

    def draw() -> None:
        nonlocal drawn_at, width
        drawn_at = time.monotonic()
        text = f"{description}: " if description else ""
        text += _format_progress(done, total, drawn_at - began, has_bar=is_terminal)
        out.write(f"\r{text.ljust(width)}" if is_terminal else f"{text}\n")
        out.flush()
        width = len(text) if is_terminal else 0

    try:
        for item in items:
            yield item
            done += 1
            if time.monotonic() - drawn_at >= pause_s:
                draw()
    finally:
        draw()
        if is_terminal:
            out.write("\n")
            out.flush()


def _format_progress(done: int, total: int | None, elapsed_s: float, *, has_bar: bool) -> str:
    rate = done / elapsed_s if elapsed_s > 0 else 0.0
    if total is None:
        return f"{done} in {_format_time(elapsed_s)}, {rate:.3g}/s"
    share = done / total if total else 1.0
    cells = min(BAR_CELLS, int(share * BAR_CELLS))
    left = f", {_format_time((total - done) / rate)} left" if rate and done < total else ""
    bar = f" |{'#' * cells}{'-' * (BAR_CELLS - cells)}|" if has_bar else ""
    return f"{share:4.0%}{bar} {done}/{total} in {_format_time(elapsed_s)}{left}, {rate:.3g}/s"


def _format_time(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"

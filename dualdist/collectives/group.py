"""A group of ranks, and the operations that their programs have begun on it.

Note [agreement]: transports take what they are given. Gloo reduces tensors of different dtypes into garbage, and waits
for ever where the sizes differ. So before an operation moves anything, the ranks exchange what each of them is ready to
do, and every rank decides alike (negotiation.py). Operations are matched by their names: those that a program has
begun without waiting for them may come in another order on another rank.

Note [who drives]: one thread at a time carries the operations of a group forward. A program that waits does it itself;
what was begun with async_op=True is carried on by a thread of ours, so that the other ranks never wait for a program
that computes.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import ControlAllgather
from dualdist.backends.shm.exchange import ShmExchange, ShmMessage
from dualdist.collectives.negotiation import CollectiveRequest, RankRequests, Response, compute_response
from dualdist.collectives.work import Handle, PendingOperation, own_parts
from dualdist.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    NotInitializedError,
    UnsupportedError,
    UsageError,
)
from dualdist.monitoring.failed_exit import RefusedCalls
from dualdist.monitoring.monitored import Monitor, MonitoredBackend
from dualdist.monitoring.process_state import OUR_THREADS
from dualdist.monitoring.wait_times import WaitTimes

if TYPE_CHECKING:
    from dualdist.collectives.fast_allreduce import FastAllreduce

T = TypeVar("T")

# Seconds between two exchanges where the first one found nothing that all ranks are ready for.
PAUSE_S = 0.001
# Seconds that our thread leaves what a program begins alone, unless somebody waits for it: what is begun together goes
# in one exchange, and a name is still in use when it is given again at once, as Horovod's programs expect.
CYCLE_S = 0.001
# Seconds that what is under way may take at shutdown, and that the thread may take to see that it is over.
DRAIN_S = 2.0
# For a rank that has joined: it waits for as long as the others go on.
PATIENCE_S = 7 * 24 * 3600.0
# Seconds after which a wait counts as one that cannot end by itself where a program has several threads: until then
# another one may begin what the other ranks wait for.
THREADS_S = 2.0
# Errors that are alike on all ranks, and leave them where they were.
HARMLESS = (MismatchError, UnsupportedError, UsageError)


class BreakOnError:
    """A block after whose failure nothing more is done in the group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CollectiveError):
            self._group.fail(error)


class Group:
    """Some of the job's ranks, or all of them, and what they have begun together."""

    def __init__(
        self, backend: Backend, monitor: Monitor, parent: Backend | None = None, mailbox: ShmExchange | None = None
    ) -> None:
        self.backend = backend
        self.ranks = backend.ranks
        self.rank = backend.rank
        self.size = backend.size
        self.monitor = monitor
        self.observer: Callable[[str, CollectiveRequest | None], None] | None = (
            None  # is told of every step, see _notify()
        )
        self.wait_times: WaitTimes | None = None  # where somebody asks who waits for whom
        self.rounds = 0  # of gradients reduced with this rank's own
        self.reducers: list[
            Any
        ] = []  # weak references to those of this group, in the order in which all ranks made them
        self._mailbox = mailbox  # where the ranks share a host: the quickest way to tell each other what they do
        self._parent = parent or backend  # which ends with the group, and with it all its lines
        self._gradients: MonitoredBackend | None = None
        self.num_unnamed = 0  # operations that were given a number
        self.exchanges = 0
        self._others: Sequence[RankRequests] = ()  # what all ranks said when nothing could be done
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for programs that wait
        self._left_alone = threading.Condition(lock)  # for our thread: there is something that nobody drives
        self._pending: dict[str, Handle[Any]] = {}
        self._waiting: dict[str, float] = {}  # what programs wait for, each with the time when it began
        self._moved_at = 0.0
        self._failure: BaseException | None = None
        self._refusals = RefusedCalls()
        self._breaking = BreakOnError(self)
        self._name_at_once = ""  # of what happens at once
        self._is_driven = False
        self._thread: threading.Thread | None = None
        self._drives_from = 0.0  # our thread, seconds on the monotonic clock
        self._is_closed = False

    @property
    def is_member(self) -> bool:
        """Whether this process is one of the group's ranks."""
        return self.rank >= 0

    @property
    def is_open(self) -> bool:
        """Whether the session goes on, and the group has not been removed."""
        return not self._is_closed

    @property
    def is_usable(self) -> bool:
        """Whether this rank can do something with the others, as far as it knows."""
        return self.is_open and self.is_member and self._failure is None

    @property
    def ignored_failure(self) -> str:
        """The failure after which the program went on in this group, if it did."""
        return str(self._failure) if self._refusals else ""

    @property
    def gradients(self) -> Backend:
        """The line on which gradients travel, whose operations are agreed on once; every member asks for it first."""
        if self._failure is not None:
            self.require_usable()
        if self._gradients is None:
            self._gradients = MonitoredBackend(self._parent.channel("gradients"), self.monitor)
        return self._gradients

    def next_name(self, kind: str) -> str:
        """For an operation that the caller left unnamed; alike on all ranks, which call in the same order."""
        self.num_unnamed += 1
        return f"{kind}.{self.num_unnamed}"

    def group_rank_of(self, rank: int) -> int:
        """The place in this group of one of the job's ranks; UsageError where it has none."""
        if rank not in self.ranks:
            raise UsageError(f"root={rank}: expected a rank of this group, one of {list(self.ranks)}")
        return self.ranks.index(rank)

    def submit(self, operation: PendingOperation[T]) -> Handle[T]:
        """Let the operation happen when all ranks are ready for it, and somebody carries it on: Note [who drives]."""
        self.require_usable()
        operation.offer.encoded  # noqa: B018  raises here what cannot be told to the others
        handle = Handle(self, operation)
        if self.size == 1:
            self._notify("entered", operation.offer)
            self._perform(handle, [operation.offer.own])
            return handle
        with self._changed:
            if handle.name in self._pending or handle.name == self._name_at_once:
                raise UsageError(
                    f"{operation.offer.what}: an operation of this name is still under way; wait for it, or choose "
                    "another name"
                )
            self._pending[handle.name] = handle
        self._notify("entered", operation.offer)
        return handle

    def require_usable(self) -> None:
        """NotInitializedError, UsageError or CollectiveError unless this rank can do something with the others."""
        if self._is_closed:
            raise NotInitializedError("this group has been closed: by dd.shutdown(), or by dd.remove_group()")
        if not self.is_member:
            raise UsageError(f"this process is no member of the group of ranks {list(self.ranks)}: let only those call")
        if self._failure is not None:
            self._refusals.add(self.backend.timeout_s, self._failure)
            raise CollectiveError(
                "the ranks are out of step since an operation failed; call dd.shutdown() and dd.init() on every rank, "
                f"or start the job again. It was: {self._failure}"
            ) from self._failure

    def fail(self, error: BaseException) -> None:
        """After this error the ranks may be at different places: nothing more is done with them."""
        if self._failure is None and not isinstance(error, HARMLESS):
            self._failure = error

    def fail_on_error(self) -> BreakOnError:
        """A block whose failure is that of the group."""
        return self._breaking

    def _perform(self, handle: Handle[Any], own: Sequence[Any]) -> None:
        offer = handle.offer
        self._notify("agreed", offer)
        handle._perform(self.backend, own, self.monitor)
        if handle.error is not None:
            self.fail(handle.error)
        if self.wait_times is not None:
            self.wait_times.record_operation(handle.began, self._waiting.get(handle.name, handle.waits_since))
        self._notify("done", offer)

    def _notify(self, event: str, offer: CollectiveRequest | None) -> None:
        """Tell the observer that an operation was "entered" here, "agreed" on or "done", or that a "cycle" begins."""
        if self.observer is not None:
            self.observer(event, offer)

    def _let_thread_drive(self) -> None:
        """What is pending goes on while the program does something else."""
        with self._changed:
            now = time.monotonic()
            if self._drives_from < now:
                self._drives_from = now + CYCLE_S
            if self._thread is None:
                self._thread = threading.Thread(target=self._progress_loop, name="dualdist-progress", daemon=True)
                self._thread.start()
            self._left_alone.notify_all()

    def _carry_on_until(self, handle: Handle[Any]) -> None:
        """Drive, or let drive, until the handle is done; rounds without a result leave the others time."""
        with self._changed:
            now = time.monotonic()
            self._moved_at = now if not self._waiting else self._moved_at
            self._waiting[handle.name] = now
            try:
                while not handle.done():
                    if self._is_driven:
                        self._changed.wait()
                    else:
                        self._drive_one_round()
            finally:
                self._waiting.pop(handle.name, None)
                if self._pending:
                    self._left_alone.notify_all()

    def run_blocking(self, express: FastAllreduce) -> torch.Tensor | Handle[torch.Tensor] | None:
        """Do what this rank's program waits for with as little as possible around it.

        None, and nothing has been sent, where something else is under way. A handle, to be waited for, where not all
        ranks do the same.
        """
        self.require_usable()
        with self._changed:
            if self._is_driven or self._pending or self.observer is not None or self.size == 1:
                return None
            self._is_driven, self._name_at_once = True, express.name
        began = 0.0 if self.wait_times is None else time.monotonic()
        try:
            with self.monitor.operation(express):
                exchange = self.exchange(express.message)
                values = exchange.suffixes(express.agreed)
                if values is not None:
                    found = express.perform(self.backend, values)
                    if self.wait_times is not None:
                        self.wait_times.record_operation(began, began or None)
                    return found
                said = exchange.wait()
            handle = Handle(self, express.operation())
            handle.began, handle.waits_since = began, began or None
            with self._changed:
                self._pending[handle.name] = handle
            self._carry_out(said, [handle])
            return handle
        except Exception as error:
            self.fail(error)
            raise
        finally:
            with self._changed:
                self._name_at_once = ""
                self._released()

    def finish_pending(self) -> None:
        """What this rank has begun is over; where it failed, its own wait() says so."""
        for handle in list(self._pending.values()):
            self._carry_on_until(handle)

    def _progress_loop(self) -> None:
        """What the thread does: carry on whatever is pending and not exclusive_progress by a waiting program."""
        with self._changed:
            while not self._is_closed:
                early_s = self._drives_from - time.monotonic()
                if self._is_driven or not self._pending:
                    self._left_alone.wait()
                elif early_s > 0:
                    self._left_alone.wait(early_s)
                else:
                    self._drive_one_round()

    def _drive_one_round(self) -> None:
        """One exchange, and what it decides; called with the lock held, which is free meanwhile."""
        self._is_driven = True
        offered = list(self._pending.values())
        row = RankRequests(tuple(handle.offer for handle in offered), self._waits_for())
        self._changed.release()
        try:
            moved = self._round(offered, row)
            if not moved:
                self._expire(offered)
                time.sleep(PAUSE_S)
        finally:
            self._changed.acquire()
            self._released()

    def _released(self) -> None:
        """Nobody drives any more; called with the lock held."""
        for name, handle in list(self._pending.items()) if self._pending else ():
            if handle.done():
                del self._pending[name]
        self._is_driven = False
        self._changed.notify_all()
        if self._pending:
            self._left_alone.notify_all()

    def _round(self, offered: Sequence[Handle[Any]], row: RankRequests) -> bool:
        """Whether anything happened. What fails in here fails the operations that were offered."""
        self._notify("cycle", None)
        try:
            mine = row.dumps()
            with self.monitor.operation(offered[0].offer):
                exchange = self.exchange(mine)
                are_alike = len(offered) == 1 and exchange.all_equal()
                said = [] if are_alike else exchange.wait()
        except Exception as error:  # whatever it is, those who wait shall see it
            self._fail_all(offered, error)
            return True
        if are_alike:
            self._perform(offered[0], [offered[0].offer.own] * self.size)
            self._moved_at = time.monotonic()
            return True
        return self._carry_out(said, offered)

    def _carry_out(self, said: Sequence[bytes], offered: Sequence[Handle[Any]]) -> bool:
        """Do what the ranks' messages compute_response; whether that was anything."""
        rows = [RankRequests.loads(data) for data in said]
        decision = compute_response(rows, self.ranks)
        self._settle(decision, offered, rows)
        has_moved = bool(decision.agreed or decision.refused)
        if has_moved:
            self._moved_at = time.monotonic()
        else:
            self._others = rows
        return has_moved

    def _waits_for(self) -> str:
        """What this rank's program does not go on without, as far as can be known."""
        if not self._waiting:
            return ""
        name, since = next(iter(self._waiting.items()))
        return name if _is_only_thread() or time.monotonic() - since > THREADS_S else ""

    def _expire(self, offered: Sequence[Handle[Any]]) -> None:
        """Give up where a program has waited for as long as it may: the others may go on exchanging for ever."""
        timeout_s = self.backend.timeout_s
        if not self._waiting or time.monotonic() - self._moved_at < timeout_s:
            return
        what = next((handle.what for handle in offered if handle.name in self._waiting), "")
        said = "; ".join(
            f"rank {rank} is ready for {row.words}" for rank, row in zip(self.ranks, self._others, strict=True)
        )
        self._fail_all(
            offered, CollectiveTimeoutError(f"{what}: not all ranks began it within {timeout_s:g} s: {said}")
        )

    def _fail_all(self, offered: Sequence[Handle[Any]], error: BaseException) -> None:
        self.fail(error)
        for handle in offered:
            handle._fail(error)

    def _settle(self, decision: Response, offered: Sequence[Handle[Any]], rows: Sequence[RankRequests]) -> None:
        handles = {handle.name: handle for handle in offered}
        for name, reason in decision.refused:
            if name in handles:
                handles[name]._fail(MismatchError(f"{handles[name].offer.what}: {reason}"))
        for name in decision.agreed:
            self._perform(handles[name], own_parts(rows, name))

    def exchange(self, payload: bytes) -> ControlAllgather | ShmMessage:
        """Every rank's payload, on every rank; one at a time, so that its name can stay, which Horovod remembers."""
        self.exchanges += 1
        if self._mailbox is not None:
            return ShmMessage(self._mailbox, payload)
        return ControlAllgather(self.backend, payload, "exchange")

    @contextlib.contextmanager
    def exclusive_progress(self) -> Iterator[None]:
        """For the block the caller alone drives, as patiently as can be; UsageError where operations are under way."""
        self.require_usable()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_driven)
            if self._pending:
                raise UsageError(f"still under way: {', '.join(self._pending)}; wait for them before this call")
            self._is_driven = True
        waiters: list[Any] = [
            self.backend,
            *filter(None, [self._gradients]),
            *filter(None, [self._mailbox and self._mailbox.peers]),
        ]
        usual_s = self.backend.timeout_s
        try:
            for waiter in filter(None, waiters):
                waiter.timeout_s = PATIENCE_S
            yield
        finally:
            for waiter in filter(None, waiters):
                waiter.timeout_s = usual_s
            with self._changed:
                self._is_driven = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the group; what is still under way then is reported, and never finishes."""
        with self._changed:
            under_way = list(self._pending.values())
            if self._thread is not None:
                self._changed.wait_for(lambda: not self._pending, DRAIN_S)
            self._is_closed = True
            self._left_alone.notify_all()
        unfinished = [handle.what for handle in under_way if not handle.done() or handle.failed()]
        if unfinished:
            warnings.warn(
                f"dualdist: shut down with {len(unfinished)} operation(s) unfinished, for which not all ranks were "
                f"ready: {'; '.join(unfinished)}",
                RuntimeWarning,
                stacklevel=4,
            )
        if self._mailbox is not None:
            self._mailbox.close()
        self._parent.close()
        if self._thread is not None:
            self._thread.join(DRAIN_S)
        for handle in self._pending.values():
            handle._fail(CollectiveError(f"{handle.what}: the session ended before all ranks were ready"))


def _is_only_thread() -> bool:
    """Whether the program has no other thread than the one that waits."""
    return sum(not thread.name.startswith(OUR_THREADS) for thread in threading.enumerate()) == 1

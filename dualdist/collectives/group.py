"""A group of ranks, and the collectives that their programs have begun on it.

Note [agreement]: transports take what they are given. Gloo reduces tensors of different dtypes into garbage, and waits
for ever where the sizes differ. So before a collective moves data, the ranks exchange requests, and every rank computes
the same response (negotiation.py). Requests are matched by name: asynchronous collectives may begin in another order on
another rank.

Note [progress]: one thread at a time makes the collectives of a group progress. A program that waits does it itself; a
background thread does it for what was begun with async_op=True, so that the other ranks never wait for a program that
computes.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dualdist.backends.base import Backend
from dualdist.backends.control_plane import ControlAllgather
from dualdist.backends.shm.channel import HostRanks, ShmMessage
from dualdist.collectives.arguments import Reduction
from dualdist.collectives.handle import Collective, Handle, rank_args_of
from dualdist.collectives.negotiation import CollectiveRequest, RankRequests, compute_response
from dualdist.collectives.rank_order import RankOrderBackend
from dualdist.errors import (
    CLOSED,
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    NotInitializedError,
    UnsupportedError,
    UsageError,
)
from dualdist.monitoring.failed_exit import exit_if_continued
from dualdist.monitoring.monitored import Monitor, MonitoredBackend
from dualdist.monitoring.process_state import OUR_THREADS
from dualdist.monitoring.wait_times import WaitTimes

if TYPE_CHECKING:
    from dualdist.collectives.fast_allreduce import FastAllreduce

T = TypeVar("T")

# Seconds between two exchanges if the first one found nothing that all ranks are ready for.
PAUSE_S = 0.001
# Seconds before the background thread acts on an asynchronous collective that no program waits for: what is begun
# together shares one exchange, and a name that is reused at once is still in use, as Horovod's programs expect.
CYCLE_S = 0.001
# Seconds that close() waits for collectives under way, and then for the background thread.
DRAIN_S = 2.0
# The timeout of a rank that has joined: it waits for as long as the others go on.
PATIENCE_S = 7 * 24 * 3600.0
# Seconds after which a wait in a program of several threads is reported as one that blocks the program: until then
# another thread may begin what the other ranks wait for.
THREADS_S = 2.0
# Errors that are raised on all ranks alike, after which the group goes on.
HARMLESS = (MismatchError, UnsupportedError, UsageError)


class Group:
    """Some or all ranks of the job, and the collectives that they have begun together.

    Attributes:
        ranks: The members' ranks in the job, in ascending order.
        rank: This process's index in `ranks`, or -1 if it is no member.
        size: The number of members.
        is_open: True until the session ends or the group is removed.
    """

    def __init__(
        self,
        backend: Backend,
        monitor: Monitor,
        parent: Backend | None = None,
        host_ranks: HostRanks | None = None,
        number: int = 0,
    ) -> None:
        self.backend = backend
        self.number = number  # by which a compiled graph finds it: 0 for that of all ranks, others are never reused
        self.ranks = backend.ranks
        self.rank = backend.rank
        self.size = backend.size
        self.reduction: Reduction = "unordered"  # where a call names none
        self.monitor = monitor
        self.observer: Callable[[str, CollectiveRequest | None], None] | None = None  # see _notify()
        self.wait_times: WaitTimes | None = None  # if the waits of the ranks are recorded
        self.gradient_reductions = 0  # gradient reductions in which this rank had gradients
        self.reducers: list[Any] = []  # ReductionPlans of this group's reducers, in the order of their creation
        self.num_unnamed = 0  # collectives that were given a numbered name
        self.exchanges = 0
        self._host_ranks = host_ranks  # if they share a host
        self._parent = parent or backend  # closed with the group, and with it its duplicates
        self._gradients: MonitoredBackend | None = None
        self._ordered_gradients: RankOrderBackend | None = None
        self._last_requests: Sequence[RankRequests] = ()  # of all ranks, when nothing could be done
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for programs that wait
        self._unattended = threading.Condition(lock)  # for the background thread
        self._pending: dict[str, Handle[Any]] = {}
        self._waiting: dict[str, float] = {}  # names that programs wait for -> when the wait began
        self._progressed_at = 0.0
        self._failure: BaseException | None = None
        self._refused_since = 0.0  # first call after the failure, on the monotonic clock
        self._blocking_name = ""  # of the collective in run_blocking()
        self._is_progressing = False  # Note [progress]
        self._thread: threading.Thread | None = None
        self._thread_starts_at = 0.0  # earliest next cycle of the background thread, on the monotonic clock
        self.is_open = True

    @property
    def is_member(self) -> bool:
        """Return True if this process is one of the group's ranks."""
        return self.rank >= 0

    @property
    def is_usable(self) -> bool:
        """Return True if this rank can begin collectives, as far as it knows."""
        return self.is_open and self.is_member and self._failure is None

    @property
    def ignored_failure(self) -> str:
        """Return the failure after which the program kept calling this group, or ""."""
        return str(self._failure) if self._refused_since else ""

    @property
    def gradients(self) -> Backend:
        """Return the backend of gradients, whose reductions are agreed on once; all members ask for it first."""
        if self._failure is not None:
            self.require_usable()
        if self._gradients is None:
            self._gradients = MonitoredBackend(self._parent.duplicate("gradients"), self.monitor)
        return self._gradients

    def ordered_gradients(self, devices: Iterable[str] = ()) -> RankOrderBackend:
        """Return the backend of gradients that are added in rank order: Note [rank order].

        All members ask for it with the same types of devices before they reduce gradients there.
        """
        if self._ordered_gradients is None:
            self._ordered_gradients = RankOrderBackend(self.gradients)
        ordered = self._ordered_gradients
        if ordered.gathers is None and not self.gradients.rank_order_devices.issuperset(devices):
            ordered.gathers = MonitoredBackend(self._parent.duplicate("gathers"), self.monitor)
        return ordered

    def next_name(self, kind: str) -> str:
        """Return a name for an unnamed collective; the same on all ranks, which call in the same order."""
        self.num_unnamed += 1
        return f"{kind}.{self.num_unnamed}"

    def group_rank_of(self, rank: int) -> int:
        """Return the index in this group of a rank of the job; raise UsageError if it is no member."""
        if rank not in self.ranks:
            raise UsageError(f"root={rank}: expected a rank of this group, one of {list(self.ranks)}")
        return self.ranks.index(rank)

    def require_usable(self) -> None:
        """Raise NotInitializedError, UsageError or CollectiveError if this rank cannot begin a collective."""
        if not self.is_open:
            raise NotInitializedError(CLOSED)
        if not self.is_member:
            raise UsageError(f"this process is no member of the group of ranks {list(self.ranks)}: let only those call")
        if self._failure is not None:
            self._refused_since = self._refused_since or time.monotonic()
            exit_if_continued(self._refused_since, self.backend.timeout_s, str(self._failure))
            raise CollectiveError(
                "the ranks are out of step since an operation failed; call dd.shutdown() and dd.init() on every rank, "
                f"or start the job again. It was: {self._failure}"
            ) from self._failure

    def fail(self, error: BaseException) -> None:
        """Refuse all further calls, unless the error left all ranks at the same point."""
        if self._failure is None and not isinstance(error, HARMLESS):
            self._failure = error

    @contextlib.contextmanager
    def fail_on_error(self) -> Iterator[None]:
        """Refuse all further calls after a CollectiveError in the block."""
        try:
            yield
        except CollectiveError as error:
            self.fail(error)
            raise

    def submit(self, collective: Collective[T]) -> Handle[T]:
        """Queue a collective, which is performed once all ranks are ready for it: Note [progress]."""
        self.require_usable()
        collective.request.encoded  # noqa: B018  raises here if it cannot be sent
        handle = Handle(collective)
        if self.size > 1:
            with self._changed:
                if handle.name in self._pending or handle.name == self._blocking_name:
                    raise UsageError(
                        f"{handle.request}: an operation of this name is still under way; wait for it, or choose "
                        "another name"
                    )
                self._pending[handle.name] = handle
        self._notify("entered", handle.request)
        if self.size == 1:
            self._perform(handle, [handle.request.rank_args])
        return handle

    def _perform(self, handle: Handle[Any], rank_args: Sequence[Any]) -> None:
        self._notify("agreed", handle.request)
        handle._perform(self.backend, rank_args, self.monitor)
        if handle.error is not None:
            self.fail(handle.error)
        if self.wait_times is not None:
            self.wait_times.record_operation(handle.began, self._waiting.get(handle.name, handle.waits_since))
        self._notify("done", handle.request)

    def _notify(self, event: str, request: CollectiveRequest | None) -> None:
        """Tell the observer that a request was "entered" here, "agreed" on or "done", or that a "cycle" begins."""
        if self.observer is not None:
            self.observer(event, request)

    def run_blocking(self, fast: FastAllreduce) -> torch.Tensor | Handle[torch.Tensor] | None:
        """Perform an allreduce that its caller waits for.

        Returns:
            The result; a handle to wait for if not all ranks do the same; or None, with nothing sent, if other
            collectives are under way.
        """
        if self._failure is not None or not self.is_open or self.rank < 0:
            self.require_usable()
        with self._changed:
            if self._is_progressing or self._pending or self.observer is not None or self.size == 1:
                return None
            self._is_progressing, self._blocking_name = True, fast.name
        began = 0.0 if self.wait_times is None else time.monotonic()
        probe = self.monitor.probe
        before = None if probe is None else probe.enter(fast)
        try:
            self.exchanges += 1  # exchange() and _end_cycle() are written out here, to call fewer functions
            exchange = fast.begin(self.backend, self._host_ranks)
            result = fast.perform(self.backend, exchange)
            if result is not None:
                if self.wait_times is not None:
                    self.wait_times.record_operation(began, began or None)
                return result
            messages = exchange.wait()
            handle = Handle(fast.collective())
            handle.began, handle.waits_since = began, began or None
            with self._changed:
                self._pending[handle.name] = handle
            self._respond(messages, [handle])
            return handle
        except Exception as error:
            described = self.monitor.describe(error, fast)
            self.fail(described)
            if described is error:
                raise
            raise described from error.__cause__
        finally:
            if probe is not None:
                probe.leave(before)
            with self._changed:
                self._blocking_name = ""
                if self._pending:
                    self._end_cycle()
                else:
                    self._is_progressing = False
                    self._changed.notify_all()

    def _progress_in_background(self) -> None:
        """Let the background thread perform what is pending while the program does something else."""
        with self._changed:
            now = time.monotonic()
            if self._thread_starts_at < now:
                self._thread_starts_at = now + CYCLE_S
            if self._thread is None:
                self._thread = threading.Thread(target=self._progress_loop, name="dualdist-progress", daemon=True)
                self._thread.start()
            self._unattended.notify_all()

    def _progress_until(self, handle: Handle[Any]) -> None:
        """Make progress, or wait for the thread that does, until the handle is done."""
        with self._changed:
            now = time.monotonic()
            self._progressed_at = now if not self._waiting else self._progressed_at
            self._waiting[handle.name] = now
            try:
                while not handle.done():
                    if self._is_progressing:
                        self._changed.wait()
                    else:
                        self._run_cycle()
            finally:
                self._waiting.pop(handle.name, None)
                if self._pending:
                    self._unattended.notify_all()

    def finish_pending(self) -> None:
        """Wait for all that this rank has begun; errors are left to each handle's own wait()."""
        for handle in list(self._pending.values()):
            self._progress_until(handle)

    def _progress_loop(self) -> None:
        """Run the background thread: perform what is pending unless a waiting program does."""
        with self._changed:
            while self.is_open:
                early_s = self._thread_starts_at - time.monotonic()
                if self._is_progressing or not self._pending:
                    self._unattended.wait()
                elif early_s > 0:
                    self._unattended.wait(early_s)
                else:
                    self._run_cycle()

    def _run_cycle(self) -> None:
        """Exchange requests once and respond; called with the lock held, which is released meanwhile."""
        self._is_progressing = True
        offered = list(self._pending.values())
        requests = RankRequests(tuple(handle.request for handle in offered), self._blocked_on())
        self._changed.release()
        try:
            if not self._exchange_requests(offered, requests):
                self._check_timeout(offered)
                time.sleep(PAUSE_S)
        finally:
            self._changed.acquire()
            self._end_cycle()

    def _end_cycle(self) -> None:
        """Let another thread make progress; called with the lock held."""
        for name, handle in list(self._pending.items()):
            if handle.done():
                del self._pending[name]
        self._is_progressing = False
        self._changed.notify_all()
        if self._pending:
            self._unattended.notify_all()

    def _exchange_requests(self, offered: Sequence[Handle[Any]], requests: RankRequests) -> bool:
        """Return True if anything was performed or refused. An error here fails all that was offered."""
        self._notify("cycle", None)
        try:
            with self.monitor.operation(offered[0].request):
                exchange = self.exchange(requests.dumps())
                all_equal = len(offered) == 1 and exchange.all_equal()
                messages = [] if all_equal else exchange.wait()
        except Exception as error:  # of any kind: those who wait must see it
            self._fail_all(offered, error)
            return True
        if all_equal:
            self._perform(offered[0], [offered[0].request.rank_args] * self.size)
            self._progressed_at = time.monotonic()
            return True
        return self._respond(messages, offered)

    def _respond(self, messages: Sequence[bytes], offered: Sequence[Handle[Any]]) -> bool:
        """Do what follows from the ranks' messages; return True if that is anything."""
        rows = [RankRequests.loads(message) for message in messages]
        response = compute_response(rows, self.ranks)
        handles = {handle.name: handle for handle in offered}
        for name, reason in response.refused:
            if name in handles:
                handles[name]._fail(MismatchError(f"{handles[name].request}: {reason}"))
        for name in response.agreed:
            self._perform(handles[name], rank_args_of(rows, name))
        if response.agreed or response.refused:
            self._progressed_at = time.monotonic()
            return True
        self._last_requests = rows
        return False

    def _blocked_on(self) -> str:
        """Return the name of the collective that blocks this rank's program, as far as can be known."""
        if not self._waiting:
            return ""
        name, since = next(iter(self._waiting.items()))
        has_one_thread = sum(not thread.name.startswith(OUR_THREADS) for thread in threading.enumerate()) == 1
        return name if has_one_thread or time.monotonic() - since > THREADS_S else ""

    def _check_timeout(self, offered: Sequence[Handle[Any]]) -> None:
        """Fail what was offered if a program has waited longer than the timeout without progress."""
        timeout_s = self.backend.timeout_s
        if not self._waiting or time.monotonic() - self._progressed_at < timeout_s:
            return
        what = next((f"{handle.request}" for handle in offered if handle.name in self._waiting), "")
        ready = "; ".join(
            f"rank {rank} is ready for {row.summary}" for rank, row in zip(self.ranks, self._last_requests, strict=True)
        )
        self._fail_all(
            offered, CollectiveTimeoutError(f"{what}: not all ranks began it within {timeout_s:g} s: {ready}")
        )

    def _fail_all(self, offered: Sequence[Handle[Any]], error: BaseException) -> None:
        self.fail(error)
        for handle in offered:
            handle._fail(error)

    def exchange(self, payload: bytes) -> ControlAllgather | ShmMessage:
        """Begin to exchange one payload per rank; one exchange at a time, under a name that Horovod can cache."""
        self.exchanges += 1
        if self._host_ranks is not None:
            return ShmMessage(self._host_ranks, payload)
        return ControlAllgather(self.backend, payload, "exchange")

    @contextlib.contextmanager
    def exclusive_progress(self) -> Iterator[None]:
        """Let only the caller make progress, without timeouts; raise UsageError if collectives are under way."""
        self.require_usable()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_progressing)
            if self._pending:
                raise UsageError(f"still under way: {', '.join(self._pending)}; wait for them before this call")
            self._is_progressing = True
        gathers = self._ordered_gradients and self._ordered_gradients.gathers
        waiters: list[Any] = [self.backend, self._gradients, gathers, self._host_ranks]
        usual_s = self.backend.timeout_s
        try:
            for waiter in filter(None, waiters):
                waiter.timeout_s = PATIENCE_S
            yield
        finally:
            for waiter in filter(None, waiters):
                waiter.timeout_s = usual_s
            with self._changed:
                self._is_progressing = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the group; warn of collectives under way, which never finish."""
        with self._changed:
            under_way = list(self._pending.values())
            if self._thread is not None:
                self._changed.wait_for(lambda: not self._pending, DRAIN_S)
            self.is_open = False
            self._unattended.notify_all()
        unfinished = [f"{handle.request}" for handle in under_way if not handle.done() or handle.failed()]
        if unfinished:
            warnings.warn(
                f"dualdist: shut down with {len(unfinished)} operation(s) unfinished, for which not all ranks were "
                f"ready: {'; '.join(unfinished)}",
                RuntimeWarning,
                stacklevel=4,
            )
        if self._host_ranks is not None:
            self._host_ranks.close()
        self._parent.close()
        if self._thread is not None:
            self._thread.join(DRAIN_S)
        for handle in self._pending.values():
            handle._fail(CollectiveError(f"{handle.request}: the session ended before all ranks were ready"))

"""A group of ranks, and the collectives that their programs have begun on it.

Note [agreement]: transports take what they are given. Gloo reduces tensors of different dtypes into garbage, and waits
for ever where the sizes differ. So before a collective moves data, the ranks exchange requests, and every rank computes
the same response (negotiation.py). Requests are matched by name: asynchronous collectives may begin in another order on
another rank.

Note [cycles]: an exchange of requests, and what follows from it, is one operation of the group's channel, a cycle. A
program that waits begins one; the channel's progress thread does it for what was begun with async_op=True, so that the
other ranks never wait for a program that computes.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

import dualdist.collectives.ddp_models  # noqa: F401  from now on it is known which models are in DDP
from dualdist.backends.base import Backend, Message
from dualdist.backends.control_plane import exchange
from dualdist.backends.operation import Staged, Stages
from dualdist.collectives.arguments import Reduction
from dualdist.collectives.handle import Collective, Handle, rank_args_of
from dualdist.collectives.negotiation import CollectiveRequest, RankRequests, compute_response
from dualdist.engine.channel import Channel, Work
from dualdist.engine.monitor import Monitor
from dualdist.errors import CollectiveError, CollectiveTimeoutError, MismatchError, UsageError
from dualdist.liveness.process_state import OUR_THREADS
from dualdist.liveness.wait_times import WaitTimes
from dualdist.utils.deadline import Deadline

T = TypeVar("T")

# Seconds between two exchanges if the first one found nothing that all ranks are ready for.
PAUSE_S = 0.001
# Seconds before the background thread acts on an asynchronous collective that no program waits for: what is begun
# together shares one exchange, and a name that is reused at once is still in use, as Horovod's programs expect.
CYCLE_S = 0.001
# Seconds that close() waits for collectives under way.
DRAIN_S = 2.0
# Seconds after which a wait in a program of several threads is reported as one that blocks the program: until then
# another thread may begin what the other ranks wait for.
THREADS_S = 2.0
NUMBERED_ALLREDUCE = re.compile(r"allreduce\.\d+")  # of a call without a name
EXCHANGE = "exchange"  # the one name of all exchanges, which Horovod can cache


class BlockingCall(Protocol):
    """An allreduce whose caller waits for it: collectives/fast_allreduce.py."""

    name: str

    def perform(self, channel: Channel) -> torch.Tensor | Message:
        """Return the reduction, or the ranks' requests if they are not all the same."""

    def collective(self) -> Collective[torch.Tensor]:
        """Return the same call for the general path."""


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
        timeout_s: float,
        parent: Backend | None = None,
        number: int = 0,
    ) -> None:
        self.backend = backend
        self.number = number  # a compiled graph finds the group by it; 0 is that of all ranks
        self.ranks = backend.ranks
        self.rank = backend.rank
        self.size = backend.size
        self.reduction: Reduction = "unordered"  # for calls that name none
        self.monitor = monitor
        self.channel = Channel(backend, monitor, timeout_s)
        self.channel.source = self._next_cycle
        self.observers = self.channel.observers  # called by _notify(), too
        self.wait_times: WaitTimes | None = None  # None unless the waits of the ranks are recorded
        self.gradient_reductions = 0  # gradient reductions in which this rank had gradients
        self.reducers: list[Any] = []  # ReductionPlans of this group's reducers, in the order of their creation
        self.num_unnamed = 0  # collectives that were given a numbered name
        self.exchanges = 0
        self.is_joined = False  # True in dd.join(), which exchanges requests itself
        self._parent = parent or backend  # closing it closes its duplicates, of which `backend` may be one
        self._gradients: Channel | None = None
        self._last_requests: Sequence[RankRequests] = ()  # of the last exchange in which nothing was ready on all ranks
        self._lock = threading.RLock()  # guards what is pending
        self._pending: dict[str, Handle[Any]] = {}
        self._cycle: Work[bool] | None = None  # Note [cycles]
        self._waiting: dict[str, float] = {}  # names that programs wait for -> when the wait began
        self._blocking_name = ""  # the name of the collective in run_blocking()
        self._waiting_calls: dict[int, CollectiveRequest] = {}  # by thread: the call whose result it waits for
        self._not_before = 0.0  # when the progress thread may begin its next cycle, on the monotonic clock

    @property
    def is_open(self) -> bool:
        """Return True until the session ends or the group is removed."""
        return self.channel.latch.is_open

    @property
    def is_member(self) -> bool:
        """Return True if this process is one of the group's ranks."""
        return self.rank >= 0

    @property
    def is_usable(self) -> bool:
        """Return True if this rank can begin collectives, as far as it knows."""
        return self.is_open and self.is_member and self.channel.latch.failure is None

    @property
    def ignored_failure(self) -> str:
        """Return the failure after which the program kept calling this group, or ""."""
        return self.channel.latch.ignored_failure

    @property
    def gradients(self) -> Channel:
        """Return the channel of gradients, whose reductions are agreed on once; all members ask for it first."""
        self.channel.latch.require_usable()
        if self._gradients is None:
            with self.channel.failing("the connections for gradients"), self.monitor.operation("dd.wrap_optimizer"):
                duplicate = self._parent.duplicate("gradients")
            self._gradients = Channel(duplicate, self.monitor, self.channel.timeout_s, self.channel.latch)
            self._gradients.observers = self.observers
        return self._gradients

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
        if self.is_open and not self.is_member:
            raise UsageError(f"this process is no member of the group of ranks {list(self.ranks)}: let only those call")
        self.channel.latch.require_usable()

    def submit(self, collective: Collective[T]) -> Handle[T]:
        """Queue a collective, which is performed once all ranks are ready for it: Note [cycles]."""
        self.require_usable()
        collective.request.encoded  # noqa: B018  raises here if it cannot be sent
        handle = Handle(collective)
        if self.size == 1:
            self._notify("entered", handle.request)
            operation = self._perform(handle, [handle.request.rank_args])
            self.channel.run(handle.request, lambda backend: operation)
            return handle
        self._require_one_thread(handle.request)
        with self._lock:
            if self.is_joined:
                raise UsageError(f"{handle.request}: another thread has called dd.join(); wait for it first")
            self._forget_done()
            if handle.name in self._pending or handle.name == self._blocking_name:
                raise UsageError(
                    f"{handle.request}: an operation of this name is still under way; wait for it, or choose "
                    "another name"
                )
            self._pending[handle.name] = handle
        self._notify("entered", handle.request)
        return handle

    @contextlib.contextmanager
    def waiting_call(self, request: CollectiveRequest) -> Iterator[None]:
        """Know this thread's call, whose result it waits for, in the block."""
        thread = threading.get_ident()
        outer, self._waiting_calls[thread] = self._waiting_calls.get(thread), request
        try:
            yield
        finally:
            if outer is None:
                del self._waiting_calls[thread]
            else:
                self._waiting_calls[thread] = outer

    def _require_one_thread(self, request: CollectiveRequest) -> None:
        """Fail if another thread waits for a call without a name, either: the ranks pair such calls by their order."""
        thread = threading.get_ident()
        others = [each for ident, each in self._waiting_calls.copy().items() if ident != thread and _is_numbered(each)]
        if not _is_numbered(request) or not (others or NUMBERED_ALLREDUCE.fullmatch(self._blocking_name)):
            return
        error = CollectiveError(
            f"{request}: another thread waits for {others[0] if others else self._blocking_name} in this group, and "
            "calls without a name are paired with those of the other ranks by their order: give each thread a group of "
            "its own by dd.new_group(), or each call a name"
        )
        error.names_operation = True
        self.channel.latch.fail(error, request)
        raise error

    def _perform(self, handle: Handle[Any], rank_args: Sequence[Any]) -> Stages[None]:
        if self.channel.latch.failure is not None:
            handle.fail(self.channel.latch.failure)
            return
        self._notify("agreed", handle.request)

        def closing_latch(error: BaseException) -> BaseException:
            described = self.monitor.describe(error, handle.request)
            self.channel.latch.fail(described, handle.request)
            return described

        yield from handle.perform(self.backend, rank_args, closing_latch)
        if self.wait_times is not None:
            self.wait_times.record_operation(handle.began, self._waiting.get(handle.name, handle.waits_since))
        self._notify("done", handle.request)

    def _notify(self, event: str, request: CollectiveRequest | None) -> None:
        """Tell the observers that a request was "entered" here, "agreed" on or "done", or that a "cycle" begins."""
        for observe in self.observers:
            observe(event, request)

    def run_blocking(self, call: BlockingCall) -> torch.Tensor | Handle[torch.Tensor] | None:
        """Perform an allreduce that its caller waits for.

        Returns:
            The result; a handle to wait for if not all ranks do the same; or None, with nothing sent, if other
            collectives are under way.
        """
        channel = self.channel
        latch, probe = channel.latch, self.monitor.probe
        if latch.failure is not None or not latch.is_open or self.rank < 0:
            self.require_usable()
        if self._pending or self.observers or self.size == 1 or self.is_joined:
            return None
        try:
            if not channel.enter():
                return None
            before = None
            try:
                self._blocking_name = call.name
                before = None if probe is None else probe.enter(call)
                began = 0.0 if self.wait_times is None else time.monotonic()
                self.exchanges += 1
                result = call.perform(channel)
                if not isinstance(result, torch.Tensor):
                    return self._respond_to_all(call, result, began)
                if self.wait_times is not None:
                    self.wait_times.record_operation(began, began or None)
                return result
            except BaseException as error:
                explained = latch.explain(error)
                described = self.monitor.describe(explained, call)  # while the probe knows that this rank is here
                latch.fail(described, call)
                if described is error:
                    raise
                raise described from explained.__cause__
            finally:
                self._blocking_name = ""
                if probe is not None:
                    probe.leave(before)
                channel.leave()
        except BaseException as error:  # an interrupt may come on either side of the call
            latch.fail(error, call)
            raise

    def _respond_to_all(self, call: BlockingCall, message: Message, began: float) -> Handle[torch.Tensor]:
        """Do what follows from the requests of ranks that do not all do the same."""
        handle = Handle(call.collective())
        handle.began, handle.waits_since = began, began or None
        self.channel.finish(Staged(self._respond(message.result, [handle])))
        if not handle.is_done:
            with self._lock:
                self._pending[handle.name] = handle  # not earlier: another thread's cycle must not offer it meanwhile
        return handle

    def attend(self) -> None:
        """Let the progress thread perform what is pending while the program does something else.

        Where operations begin in the program's order, the program offers once now what is pending.
        """
        if self.backend.in_program_order and self.size > 1:
            cycle = self._current_cycle()
            if cycle is not None:
                with contextlib.suppress(CollectiveError):  # which handles raise in wait()
                    cycle.wait()
            return
        now = time.monotonic()
        if self._not_before < now:
            self._not_before = now + CYCLE_S
        self.channel.attend()

    def poll(self) -> None:
        """Move what is pending without waiting, where no thread does."""
        if self.backend.in_program_order and self.size > 1:
            cycle = self._current_cycle()
            if cycle is not None:
                cycle.done()

    def _next_cycle(self) -> float | None:
        """Begin a cycle for the progress thread: see Channel.attend."""
        with self._lock:
            self._forget_done()
            if not self._pending or not self.is_open or self.size == 1:
                return None
            early_s = self._not_before - time.monotonic()
            if early_s > 0:
                return early_s
            try:
                self._current_cycle()
            except (CollectiveError, UsageError) as error:
                self._fail_pending(error)
                return None
        return CYCLE_S  # it may have ended already, with requests that other ranks lack

    def wait_for(self, handle: Handle[Any]) -> None:
        """Begin cycles, or wait for those that another thread has begun, until the handle is done."""
        self._waiting[handle.name] = time.monotonic()
        try:
            self._run_cycles(handle)
        except BaseException as error:
            self.channel.latch.fail(error, handle.request)
            self._fail_pending(error)
            if not isinstance(error, Exception) or handle.error is None:
                raise
        finally:
            self._waiting.pop(handle.name, None)
            self._forget_done()
            if self._pending and self._thread_attends:
                self.channel.attend()

    def _run_cycles(self, handle: Handle[Any]) -> None:
        limit_s = handle.timeout_s or self.channel.timeout_s
        deadline = Deadline(limit_s)
        while not handle.is_done:
            cycle = self._current_cycle()
            if cycle is None:
                continue
            try:
                if cycle.wait():
                    deadline = Deadline(limit_s)
                    continue
            except CollectiveError:
                if handle.is_done:
                    return
                raise
            if deadline.passed():
                raise self._negotiation_timeout(handle.request, limit_s)
            time.sleep(PAUSE_S)

    @property
    def _thread_attends(self) -> bool:
        """Return True if some collectives were begun for the progress thread."""
        return self._not_before > 0.0  # it is 0.0 until the first of them

    def finish_pending(self) -> None:
        """Wait for all that this rank has begun; errors are left to each handle's own wait()."""
        for handle in list(self._pending.values()):
            self.wait_for(handle)

    def _current_cycle(self) -> Work[bool] | None:
        """Return the cycle under way, or a new one; None if nothing is pending."""
        with self._lock:
            if self._cycle is not None and not self._cycle.is_done:
                return self._cycle
            self._forget_done()
            offered = list(self._pending.values())
            if not offered:
                return None
            limits_s = [each.timeout_s for each in offered if each.timeout_s is not None]
            limit_s = max(limits_s, default=None)
            cycle = self.channel.start(offered[0].request, lambda backend: self._run_cycle(offered), timeout_s=limit_s)
            self._cycle = cycle
            return cycle

    def _run_cycle(self, offered: Sequence[Handle[Any]]) -> Stages[bool]:
        """Exchange requests once, and respond; return True if anything was performed or refused."""
        self._notify("cycle", None)
        begun = self._gradients.started if self._gradients is not None and self.backend.in_program_order else 0
        requests = RankRequests(tuple(handle.request for handle in offered), self._blocked_on(), begun=begun)
        try:
            message = self.exchange(requests.dumps())
            yield message
            if len(offered) == 1 and message.is_equal:
                yield from self._perform(offered[0], [offered[0].request.rank_args] * self.size)
                return True
            return (yield from self._respond(message.result, offered))
        except Exception as error:  # of any kind: those who wait must see it
            described = self.monitor.describe(error, offered[0].request)
            for handle in offered:
                handle.fail(described)
            if described is error:
                raise
            raise described from error.__cause__

    def _respond(self, messages: Sequence[bytes], offered: Sequence[Handle[Any]]) -> Stages[bool]:
        """Do what follows from the ranks' messages; return True if that is anything."""
        rows = [RankRequests.loads(message) for message in messages]
        response = compute_response(rows, self.ranks)
        handles = {handle.name: handle for handle in offered}
        for name, reason in response.refused:
            if name in handles:
                is_refusal = any((request := row.request(name)) is not None and request.refusal for row in rows)
                kind = UsageError if is_refusal else MismatchError
                handles[name].fail(kind(f"{handles[name].request}: {reason}"))
        for name in response.agreed:
            yield from self._perform(handles[name], rank_args_of(rows, name))
        if response.agreed or response.refused:
            return True
        self._last_requests = rows
        if self._thread_attends:
            self._not_before = time.monotonic() + PAUSE_S
        return False

    def _forget_done(self) -> None:
        """Free the names of what is done."""
        with self._lock:
            for name, handle in list(self._pending.items()):
                if handle.is_done:
                    del self._pending[name]

    def _fail_pending(self, error: BaseException) -> None:
        """Fail all that is pending, if this rank can begin nothing any more."""
        if self.channel.latch.failure is None and self.is_open:
            return
        for handle in list(self._pending.values()):
            handle.fail(error)
        self._forget_done()

    def _blocked_on(self) -> str:
        """Return the name of the collective that blocks this rank's program, as far as can be known."""
        waits = list(self._waiting.items())
        if not waits:
            return ""
        name, since = waits[0]
        has_one_thread = sum(not thread.name.startswith(OUR_THREADS) for thread in threading.enumerate()) == 1
        return name if has_one_thread or time.monotonic() - since > THREADS_S else ""

    def _negotiation_timeout(self, request: CollectiveRequest, limit_s: float) -> CollectiveTimeoutError:
        """Return the error of a collective that not all ranks have begun."""
        ready = "; ".join(
            f"rank {rank} is ready for {row.summary}" for rank, row in zip(self.ranks, self._last_requests, strict=True)
        )
        return CollectiveTimeoutError(f"{request}: not all ranks began it within {limit_s:g} s: {ready}")

    def exchange(self, payload: bytes) -> Message:
        """Begin to exchange one payload per rank, in a cycle or in join()."""
        self.exchanges += 1
        return exchange(self.backend, payload, EXCHANGE)

    def require_nothing_pending(self) -> None:
        """Raise UsageError if collectives are under way."""
        self._forget_done()
        if self._pending:
            raise UsageError(f"still under way: {', '.join(self._pending)}; wait for them before this call")

    def close(self) -> None:
        """End the group; warn of collectives under way, which never finish."""
        under_way = list(self._pending.values())
        deadline = Deadline(DRAIN_S)
        while self._pending and self._thread_attends and self.is_usable and not deadline.passed():
            self._forget_done()
            deadline.sleep(PAUSE_S)
        self.channel.latch.is_open = False
        self.channel.latch.abandon()
        unfinished = [f"{handle.request}" for handle in under_way if not handle.is_done or handle.failed()]
        if unfinished:
            warnings.warn(
                f"dualdist: shut down with {len(unfinished)} operation(s) unfinished, for which not all ranks were "
                f"ready: {'; '.join(unfinished)}",
                RuntimeWarning,
                stacklevel=4,
            )
        if self.backend.messenger is not None:
            self.backend.messenger.close()
        try:
            self._parent.close()
        except CollectiveError as error:
            raise self.monitor.describe(error, "dd.shutdown") from error.__cause__
        finally:
            for channel in filter(None, (self.channel, self._gradients)):
                channel.close()
            for handle in self._pending.values():
                handle.fail(CollectiveError(f"{handle.request}: the session ended before all ranks were ready"))
            self._cycle, self.channel.source = (
                None,
                None,
            )  # else a cycle keeps the shared memory until a garbage collection


def _is_numbered(request: CollectiveRequest) -> bool:
    """Return True if the call had no name, so that next_name() gave it a number."""
    kind, _, number = request.name.rpartition(".")
    return kind == request.kind and number.isdecimal()

"""Supervise a job that keeps its ranks when one is lost: start programs again, and give ranks to those that are ready.

Generations (generations.py) decides; this starts and ends the programs, and carries the messages.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from dualdist.launch.failure import RankEnd, exit_code, first_failure
from dualdist.launch.generations import Generations, Order
from dualdist.launch.host_discovery import HostDiscovery
from dualdist.launch.job import Command, Host
from dualdist.launch.supervisor import END_S, NOTICE_S, TICK_S, Connection, JobOutcome, Supervisor
from dualdist.utils import control_channel
from dualdist.utils.control_channel import Assignment, ProgramHello, ProgramReady, PublishedAddress, RankHello
from dualdist.utils.variables import REQUEUE

# Seconds for which a job waits with fewer ranks than it needs; Horovod's default.
ELASTIC_TIMEOUT_S = 600.0


@dataclass
class ElasticSupervisor(Supervisor):
    """One run of a job; each command starts the program of a place, as often as `generations` says.

    With `discovery` places come and go with the hosts that it finds, at most `max_places`. `make_command` starts the
    program of a place on a host.
    """

    min_ranks: int = 1
    elastic_timeout_s: float = ELASTIC_TIMEOUT_S
    discovery: HostDiscovery | None = None
    make_command: Callable[[int, Host], Command] | None = None
    max_places: float = math.inf
    host_names: list[str] = field(default_factory=list)  # of each place, with `discovery`

    def __post_init__(self) -> None:
        super().__post_init__()
        self._generations = Generations(len(self.commands), self.min_ranks, self.elastic_timeout_s)
        self._running_at: dict[int, subprocess.Popen[bytes]] = {}  # by place
        self._programs: dict[socket.socket, int] = {}  # connections of programs, and their places
        self._seen_ends = 0  # of self.ends
        self._member_ends: list[RankEnd] = []  # of the current generation's programs, with their ranks
        self._asked_at: dict[int, float] = {}  # when the program of a place was asked to end
        self._offered: tuple[Host, ...] = ()  # the hosts that the places follow

    def _start_all(self) -> None:
        self._follow_hosts()
        self._start_due()

    def _start_due(self) -> None:
        for place in self._generations.start_due(time.monotonic()):
            self._start(self.commands[place])
            self._running_at[place] = self._processes[-1]

    def _watch(self, began: float, timeout_s: float | None) -> str:
        """Return "" when the job is over; else the error of a timeout."""
        stopped_at = math.inf
        while not self._generations.is_over:
            self._step(TICK_S)
            now = time.monotonic()
            if self._forward_stop():
                stopped_at = min(stopped_at, now)
            self._handle_ends()
            self._follow_hosts()
            self._send(self._generations.next_orders(now))
            for place in self._generations.find_overdue(now):
                self._end_place(place, now)
            if not self._stop_signal:
                self._start_due()
            if now > stopped_at + NOTICE_S:
                return f"the job did not stop within {NOTICE_S:g} s of {signal.Signals(self._stop_signal).name}"
            if timeout_s is not None and now > began + timeout_s:
                return f"the job was not done after {round(timeout_s, 1):g} s"
        if self._generations.problem:
            print(f"dualdist run: {self._generations.problem}", file=sys.stderr)
        return ""

    def _follow_hosts(self) -> None:
        """Add and withdraw places as hosts come and go."""
        if self.discovery is None or self.discovery.hosts is self._offered:
            return
        assert self.make_command is not None
        self._offered = self.discovery.hosts
        slots = {host.name: host.slots for host in self._offered}
        used: Counter[str] = Counter()
        # Programs that train keep their slots, before those that only run and places whose program was lost.
        places = self._generations.places
        for place in sorted(range(len(places)), key=lambda n: (not places[n].is_member, not places[n].runs)):
            name = self.host_names[place]
            if places[place].is_withdrawn:
                continue
            if used[name] < slots.get(name, 0):
                used[name] += 1
            else:
                self._generations.withdraw(place)
        for host in self._offered:
            while used[host.name] < host.slots and used.total() < self.max_places:
                self.commands = [*self.commands, self.make_command(len(self.commands), host)]
                self.host_names.append(host.name)
                self._generations.add_place()
                used[host.name] += 1

    def _handle_ends(self) -> None:
        """Record the ends that ranks have reported, then those of processes, which may report nothing."""
        for end in self.ends[self._seen_ends :]:
            if (place := end.rank) is not None:
                if (rank := self._generations.places[place].rank) is not None:
                    self._member_ends.append(replace(end, rank=rank))
                self._record_end(place, end.code, end.host)
        self._seen_ends = len(self.ends)
        for place, process in list(self._running_at.items()):
            if process.poll() is not None and self._rank_connection(place) is None:
                del self._running_at[place]
                self._record_end(place, process.returncode, "")  # without effect if its rank has reported it

    def _record_end(self, place: int, code: int | None, host: str) -> None:
        rank = self._generations.places[place].rank
        orders = self._generations.set_ended(place, code, time.monotonic())
        if orders and code not in (0, REQUEUE) and not self._stop_signal:
            who = RankEnd(rank, host, code, 0.0).label(has_hosts=len(self.hosts) > 1)
            how = "was lost" if code is None or code < 0 else f"failed with exit code {code}"
            print(f"dualdist run: {who} {how}: the others meet again without it", file=sys.stderr)
        self._asked_at.pop(place, None)
        for sock in [sock for sock, other in self._programs.items() if other == place]:
            self._drop(sock)  # what it says does not count for the next program of the place
        self._send(orders)

    def _rank_connection(self, place: int) -> socket.socket | None:
        """Return the connection of the rank process of a place."""
        ranks = [(sock, each.hello) for sock, each in self._connections.items() if each.is_rank and each.hello]
        return next((sock for sock, hello in ranks if hello.rank == place), None)

    def _end_place(self, place: int, now: float) -> None:
        """Ask the rank process of a place to end its program; kill both if that takes too long."""
        connection = self._rank_connection(place)
        asked_at = self._asked_at.setdefault(place, now)
        if connection is not None and now <= asked_at + END_S:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            return
        if (process := self._running_at.get(place)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if connection is not None:
            self._drop(connection)  # which records it as lost
        else:
            self._record_end(place, None, "")

    def _send(self, orders: Iterable[Order]) -> None:
        for place, message in orders:
            if isinstance(message, Assignment) and message.rank == 0:
                self._member_ends.clear()
            self._send_to(place, message)

    def _send_to(self, place: int, message: control_channel.Message) -> None:
        for sock, other in self._programs.items():
            if other == place:
                with contextlib.suppress(OSError):  # its rank process will report its end
                    sock.sendall(control_channel.dumps(message))

    def _handle(self, sock: socket.socket, connection: Connection, message: bytes) -> bool:
        if sock in self._programs:
            return self._handle_program(self._programs[sock], message)
        hello = None if connection.hello is not None else control_channel.loads(ProgramHello, message)
        if hello is None:
            return super()._handle(sock, connection, message)
        if hello.token != self.token or hello.place not in range(len(self.commands)) or self._is_ending:
            return False
        if not self._generations.places[hello.place].runs:
            return False
        connection.hello = RankHello(hello.token, None, "", is_guard=True)  # no rank: its end is not reported here
        self._programs[sock] = hello.place
        with contextlib.suppress(OSError):
            sock.sendall(control_channel.WELCOME)
            control_channel.keep_alive(sock)
        return True

    def _handle_program(self, place: int, message: bytes) -> bool:
        if ready := control_channel.loads(ProgramReady, message):
            self._generations.set_ready(place, ready, time.monotonic())
        elif address := control_channel.loads(PublishedAddress, message):
            if address.generation == self._generations.number:
                for other in self._programs.values():
                    self._send_to(other, address)
        else:
            return False
        return True

    def _drop(self, sock: socket.socket) -> None:
        self._programs.pop(sock, None)
        super()._drop(sock)

    def _outcome(self, error: str) -> JobOutcome:
        stopped = self._stop_signal
        if self._generations.has_succeeded and not error:
            return JobOutcome(0, stop_signal=stopped)
        ends = self._member_ends if self._generations.number else self.ends
        if not error and any(end.code == REQUEUE for end in ends):
            return JobOutcome(REQUEUE, stop_signal=stopped)
        if error or stopped:
            return JobOutcome(128 + stopped if stopped else 124, error=error, stop_signal=stopped)
        codes = [process.returncode for process in self._processes]
        failure: RankEnd | None = first_failure(ends)
        return JobOutcome(exit_code(codes, failure, launcher_restarts_ranks=False) or 1, failure)

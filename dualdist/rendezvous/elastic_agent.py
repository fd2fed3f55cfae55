"""Connection of a program to the `dualdist run --min-ranks` that started it, which assigns ranks anew after a loss.

Note [generations]: `dualdist run` starts a program at each place of the job. The programs that are ready get ranks, and
are a generation: they meet, and train until a rank is lost, or until programs that were started later are ready and the
others have committed. Then all are ready again, and the next generation begins. Programs that have the training's state
get the low ranks, so that rank 0 has it. Where rank 0 listens, the others learn from `dualdist run`: no
rank has to outlive another.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from dualdist.environments.torchrun import OVERRIDE_VARIABLES
from dualdist.errors import RendezvousError
from dualdist.rendezvous.address_exchange import AddressExchange
from dualdist.utils import control_channel
from dualdist.utils.control_channel import (
    CONTROL_VARIABLE,
    MAX_MESSAGE_BYTES,
    Assignment,
    ControlAddress,
    ControlChannelError,
    JobOver,
    ProgramHello,
    ProgramReady,
    PublishedAddress,
    RanksChange,
)
from dualdist.utils.variables import PLACE

# Seconds in which the report of a loss follows the error that the loss causes in another rank.
LOSS_REPORT_S = 3.0
RECEIVED: tuple[type[control_channel.Message], ...] = (Assignment, PublishedAddress, RanksChange, JobOver)


def has_agent(environ: Mapping[str, str]) -> bool:
    """Return True if `dualdist run --min-ranks` started this program, and assigns its rank."""
    return bool(environ.get(PLACE)) and bool(environ.get(CONTROL_VARIABLE))


class ElasticAgent:
    """The connection; a thread receives what `dualdist run` sends."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Connect, for this process alone and not for those that it starts; RendezvousError if that is impossible."""
        try:
            address = ControlAddress.loads(environ.pop(CONTROL_VARIABLE))
            self._socket = control_channel.connect(address, ProgramHello(address.token, int(environ[PLACE])))
        except (ValueError, ControlChannelError) as error:
            raise RendezvousError(f"the program cannot reach the dualdist run that started it ({error})") from error
        self._socket.setblocking(True)
        self._changed = threading.Condition()
        self._assignment = Assignment(0, 0, 1)
        self._addresses: dict[int, str] = {}
        self._loss = self._joining = RanksChange(0, "", is_lost=False)  # the last of each kind
        self._over: JobOver | None = None
        self._listeners: list[Callable[[str], None]] = []
        self.timed_out = False  # an operation of this generation
        self.has_state = False  # the training's: see ProgramReady
        threading.Thread(target=self._receive, name="dualdist-elastic-agent", daemon=True).start()

    def next_variables(self, timeout_s: float) -> dict[str, str]:
        """Report that this program is ready, and return the variables that give its rank in the next generation.

        Waits as long as `dualdist run` does: until at least --min-ranks programs are ready, or --elastic-timeout.

        Raises:
            SystemExit: the job is over; with the code that `dualdist run` gives.
        """
        last = self._assignment.generation
        self._send(ProgramReady(timeout_s, self.timed_out, self.has_state))
        self.timed_out = False
        with self._changed:
            self._changed.wait_for(lambda: self._over is not None or self._assignment.generation > last)
        assignment, over = self._assignment, self._over
        if over is not None and assignment.generation == last:
            print(f"dualdist: {over.reason}", file=sys.stderr, flush=True)
            raise SystemExit(over.code)
        numbers = {OVERRIDE_VARIABLES.rank: assignment.rank, OVERRIDE_VARIABLES.size: assignment.size}
        return {name: str(number) for name, number in numbers.items()}

    def address_exchange(self) -> AddressExchange:
        """Return the exchange by which the ranks of this generation learn where rank 0 listens."""
        return AgentAddressExchange(self, self._assignment.generation)

    def publish_address(self, generation: int, address: str) -> None:
        self._send(PublishedAddress(generation, address))

    def find_address(self, generation: int) -> str | None:
        return self._addresses.get(generation)

    @property
    def generation(self) -> int:
        return self._assignment.generation

    def find_loss(self, generation: int, wait_s: float = 0.0) -> str:
        """Return which rank of a generation was lost first, "" if none was reported within `wait_s`.

        A generation that is over has lost one, too.
        """

        def is_lost() -> bool:
            return self._loss.generation >= generation or self.generation > generation

        with self._changed:
            return (self._loss.reason or "the ranks have changed") if self._changed.wait_for(is_lost, wait_s) else ""

    def watch(self, changed: Callable[[str], None]) -> Callable[[], None]:
        """Call `changed` with the reason when programs wait to join, now or later; return a function that ends this."""
        self._listeners.append(changed)
        if self._joining.generation == self.generation > 0:
            changed(self._joining.reason)
        return lambda: self._listeners.remove(changed)

    def _send(self, message: ProgramReady | PublishedAddress) -> None:
        with contextlib.suppress(OSError):  # _receive() finds the connection closed
            self._socket.sendall(control_channel.dumps(message))

    def _receive(self) -> None:
        unread = b""
        while True:
            data = b""
            with contextlib.suppress(OSError):
                data = self._socket.recv(MAX_MESSAGE_BYTES)
            if not data:
                self._handle(JobOver(1, "the dualdist run that started this program has ended, or cannot be reached"))
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                for kind in RECEIVED:
                    if (message := control_channel.loads(kind, line)) is not None:
                        self._handle(message)

    def _handle(self, message: control_channel.Message) -> None:
        with self._changed:
            if isinstance(message, Assignment):
                self._assignment = message
            elif isinstance(message, PublishedAddress):
                self._addresses = {message.generation: message.address}
            elif isinstance(message, RanksChange) and message.is_lost:
                self._loss = message
            elif isinstance(message, RanksChange):
                self._joining = message
            elif isinstance(message, JobOver):
                self._over = message
            self._changed.notify_all()
        if isinstance(message, RanksChange) and not message.is_lost:
            for listener in list(self._listeners):
                listener(message.reason)


@dataclass(frozen=True)
class AgentAddressExchange(AddressExchange):
    """The exchange of rank 0's address by way of `dualdist run`."""

    agent: ElasticAgent
    generation: int

    def publish(self, text: str) -> None:
        self.agent.publish_address(self.generation, text)

    def read(self) -> str | None:
        return self.agent.find_address(self.generation)

    def describe(self) -> str:
        return "from dualdist run"

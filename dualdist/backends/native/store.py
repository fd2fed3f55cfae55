"""Key-value store of torch, through which the ranks of a job meet."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from dualdist.backends.base import TIMED_OUT
from dualdist.errors import RendezvousError
from dualdist.utils.deadline import Deadline, call_within
from dualdist.utils.network_interfaces import format_endpoint


class TcpStore:
    """A Store over one of torch's, mostly a TCPStore."""

    def __init__(self, store: dist.Store, address: str, endpoint: str) -> None:
        self.store = store
        self.address = address
        self.endpoint = endpoint

    def set(self, key: str, value: str) -> None:
        with self._translated_errors():
            self.store.set(key, value)

    def get(self, key: str, timeout_s: float) -> str:
        with self._translated_errors():
            if timeout_s <= 0 and not self.store.check([key]):
                raise TimeoutError(key)
            self.store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            value: bytes = self.store.get(key)
            return value.decode()

    def add(self, key: str, amount: int) -> int:
        with self._translated_errors():
            return int(self.store.add(key, amount))

    def has(self, key: str) -> bool:
        with self._translated_errors():
            return bool(self.store.check([key]))

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise TimeoutError and RendezvousError for torch's errors of a store in the block."""
        try:
            yield
        except dist.DistError as error:
            if isinstance(error, dist.DistStoreError) and any(word in str(error).lower() for word in TIMED_OUT):
                raise TimeoutError(str(error)) from error
            raise RendezvousError(
                f"the store at {self.endpoint}, which rank 0 or its launcher serves, is gone ({first_line(error)}): "
                "see what that process printed last"
            ) from error


def connect(address: str, port: int, listener: socket.socket | None, deadline: Deadline) -> TcpStore:
    """Connect to the store at address:port, after serving it on the listening socket if one is given."""
    endpoint = format_endpoint(address, port)
    fd = listener.detach() if listener else None

    def open_store() -> dist.TCPStore:
        return dist.TCPStore(
            address,
            port,
            is_master=fd is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(deadline.left_s(), 1.0)),
            master_listen_fd=fd,
        )

    foreign = (
        f"something listens on {endpoint}, but it is not the store of this job: does another program use this port?"
    )
    try:
        return TcpStore(call_within(deadline.left_s(), open_store, lambda: RendezvousError(foreign)), address, endpoint)
    except dist.DistError as error:
        raise RendezvousError(f"{foreign} ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a torch error, without the location in its source and without its advice."""
    text = re.sub(r"\[[^]]*\.cc:\d+\] ", "", str(error).strip())
    return text.splitlines()[0].split(". This is typically")[0] if text else type(error).__name__

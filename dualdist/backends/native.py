"""The backend over torch.distributed: Gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import atexit
import re
import socket
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dualdist.backends.base import Names, ReduceOp, Store, describe
from dualdist.deadline import Deadline, call_within
from dualdist.errors import (
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    RankLostError,
    RendezvousError,
    UnsupportedError,
)
from dualdist.variables import variables_set

OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# What Gloo and NCCL write, in lower case, when a rank is late and when it is gone.
LATE = ("timed out", "timeout")
GONE = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
)


# torch 2.13 renames it and warns of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TcpStore:
    """torch's TCPStore with our errors."""

    def __init__(self, store: dist.Store, address: str, where: str) -> None:
        self.store = store
        self.address = address
        self._where = where

    def set(self, key: str, value: str) -> None:
        with self._ours():
            self.store.set(key, value)

    def get(self, key: str, timeout_s: float) -> str:
        with self._ours():
            if timeout_s <= 0 and not self.store.check([key]):
                raise TimeoutError(key)
            self.store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            value: bytes = self.store.get(key)
            return value.decode()

    def add(self, key: str, amount: int) -> int:
        with self._ours():
            return int(self.store.add(key, amount))

    def has(self, key: str) -> bool:
        with self._ours():
            return bool(self.store.check([key]))

    def _ours(self) -> _StoreErrors:
        return _StoreErrors(self._where)


class _StoreErrors:
    """Turns torch's errors of a store into TimeoutError and RendezvousError."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, dist.DistStoreError) and any(word in str(error).lower() for word in LATE):
            raise TimeoutError(str(error)) from error
        if isinstance(error, dist.DistError):
            raise RendezvousError(
                f"the store at {self._where}, which rank 0 or its launcher serves, is gone ({_first_line(error)}): "
                "see what that process printed last"
            ) from error


def connect(address: str, port: int, listener: socket.socket | None, deadline: Deadline) -> TcpStore:
    """A store at address:port, served here where a listening socket is given."""
    where = f"{address}:{port}"
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

    foreign = f"something listens on {where}, but it is not the store of this job: does another program use this port?"
    try:
        return TcpStore(call_within(deadline.left_s(), open_store, lambda: RendezvousError(foreign)), address, where)
    except dist.DistError as error:
        raise RendezvousError(f"{foreign} ({_first_line(error)})") from error


class NativeWork:
    """One asynchronous operation of torch.distributed."""

    def __init__(self, work: dist.Work, result: torch.Tensor, what: str, timeout_s: float) -> None:
        self._work = work
        self._result = result
        self._what = what
        self._timeout_s = timeout_s

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        try:
            self._work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise translated(error, self._what, self._timeout_s) from error
        return self._result


class NativeBackend:
    """Moves tensors over a process group; `owned` says that it was made here and ends with close()."""

    name = "native"

    def __init__(self, transport: str, timeout_s: float, *, owned: bool) -> None:
        self.transport = transport
        self.timeout_s = timeout_s
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.names = Names()
        self.reducers: list[Any] = []
        self.is_open = True
        self._owned = owned
        if owned:
            # Gloo's threads must end before the interpreter, or they abort the process (pytorch pull request 179291).
            atexit.register(self.close)

    def allreduce_(self, buffer: torch.Tensor, op: ReduceOp, name: str) -> NativeWork:
        what = describe("allreduce", name, buffer)
        return self._start(what, buffer, lambda: dist.all_reduce(buffer, OPS[op], async_op=True))

    def allgather(self, tensor: torch.Tensor, name: str) -> NativeWork:
        what = describe("allgather", name, tensor)
        output = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        return self._start(what, output, lambda: _all_gather_single(output, tensor, async_op=True))

    def broadcast_(self, buffer: torch.Tensor, root: int, name: str) -> NativeWork:
        what = describe("broadcast", name, buffer)
        return self._start(what, buffer, lambda: dist.broadcast(buffer, root, async_op=True))

    def close(self) -> None:
        self.is_open = False
        atexit.unregister(self.close)
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()

    def _start(self, what: str, result: torch.Tensor, start: Callable[[], dist.Work | None]) -> NativeWork:
        try:
            work = start()
        except (RuntimeError, ValueError) as error:
            raise translated(error, what, self.timeout_s) from error
        assert work is not None, "an asynchronous call in a group of ours returns its work"
        return NativeWork(work, result, what, self.timeout_s)


def existing_group() -> tuple[int, int] | None:
    """Rank and size in torch.distributed's default group where the program has set one up, else None."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def adopt(device: torch.device, timeout_s: float) -> tuple[NativeBackend, TcpStore]:
    """Use the default group that is there, and its store, and leave both alone at close()."""
    kinds = {kind.type for kind in dist.group.WORLD._device_types}  # type: ignore[union-attr]
    if "cpu" not in kinds:
        raise UnsupportedError(
            f"torch.distributed's default group moves {', '.join(sorted(kinds))} tensors only, and dualdist moves "
            'CPU tensors too: set the group up with init_process_group("cpu:gloo,cuda:nccl"), or not at all'
        )
    transport = "nccl" if device.type in kinds - {"cpu"} else "gloo"
    store = dist.PrefixStore("dualdist", dist.distributed_c10d._get_default_store())
    return NativeBackend(transport, timeout_s, owned=False), TcpStore(store, "", "torch.distributed's own store")


def start(
    rank: int,
    size: int,
    store: Store | None,
    key: str,
    interface: str | None,
    environ: MutableMapping[str, str],
    device: torch.device,
    timeout_s: float,
) -> NativeBackend:
    """Set up torch.distributed's default group over the store; a group of one needs none.

    `interface` is the network interface towards the other nodes, where there are any and the user has not named one.
    """
    if not dist.is_available():
        raise BackendUnavailableError("this torch was built without torch.distributed: install another build of torch")
    nccl = device.type == "cuda" and dist.is_nccl_available()
    inner: dist.Store = dist.HashStore() if store is None else store.store  # type: ignore[attr-defined]
    names = [name for name in INTERFACES if interface and name not in environ]
    try:
        with variables_set(environ, dict.fromkeys(names, interface)):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=dist.PrefixStore(f"{key}/group", inner),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} of {size} met the others, but torch could not connect them ({_first_line(error)}): "
            f"if the hosts have several networks, name the one they share in {' and '.join(INTERFACES)}"
        ) from error
    return NativeBackend("nccl" if nccl else "gloo", timeout_s, owned=True)


def translated(error: Exception, what: str, timeout_s: float) -> Exception:
    """Our error for one that torch.distributed raised."""
    text = str(error).lower()
    if any(word in text for word in GONE):
        return RankLostError(f"{what}: another rank ended or its connection broke ({_first_line(error)})")
    if any(word in text for word in LATE):
        return CollectiveTimeoutError(f"{what}: not all ranks arrived within {timeout_s:g} s ({_first_line(error)})")
    if "invalid scalar type" in text or "unsupported" in text or "not support" in text:
        return UnsupportedError(f"{what}: torch.distributed cannot move this ({_first_line(error)})")
    return CollectiveError(f"{what}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """What torch says, without the place in its source and without its advice."""
    text = re.sub(r"\[[^]]*\.cc:\d+\] ", "", str(error).strip())
    return text.splitlines()[0].split(". This is typically")[0] if text else type(error).__name__

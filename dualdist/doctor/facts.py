"""The facts that the checks judge: this host, this Python's packages, and the MPIs on PATH; no job is started."""

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from dualdist.backends.shm.segment import FOLDER
from dualdist.environments.visible_devices import hides_all
from dualdist.errors import RendezvousError
from dualdist.horovod_build.record import BuildRecord, read_record
from dualdist.launch.execute import parse_mpi_version
from dualdist.launch.job import Mpi
from dualdist.topology import Topology
from dualdist.utils.extension import built_for
from dualdist.utils.machine import CORE, gpu_names, package_version, quota_cores, versions
from dualdist.utils.network_interfaces import LOOPBACK, is_loopback, list_interfaces, resolve_address
from dualdist.utils.package_probe import TorchProbe, probe_torch, run_probe, run_tool
from dualdist.version import __version__

TOOL_TIMEOUT_S, HOROVOD_TIMEOUT_S, MPI4PY_TIMEOUT_S = 15.0, 120.0, 60.0
PACKAGES = ("torch", "torchvision", "horovod", "mpi4py")
UNLIMITED = -1
INFINIBAND = Path("/sys/class/infiniband")
MPI_PROGRAMS = ("mpirun", "mpiexec")
MPI_VERSION = re.compile(r"(?:\(Open ?MPI\)|\(OpenRTE\)|Version:?)\s*v?(\d+(?:\.\d+)+)")
# The heading of `srun --mpi=list`; newer Slurms say "plugin", and list the PMIx versions after the types.
SRUN_HEADING = re.compile(r"(MPI (?:plugin )?types are\.\.\.)")
HOROVOD_PROGRAM = """
import json
import horovod.torch as hvd
nccl = hvd.nccl_built()  # the version's number, such as 21805
print(json.dumps({"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": str(nccl) if nccl else None}))
"""
# Querying the library's version does not initialize MPI, which could end the process, and needs no launcher.
MPI4PY_PROGRAM = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libmpi" in line}
print(json.dumps({"library": MPI.Get_library_version().strip("\\0 \\n"), "files": sorted(files)}))
"""


@dataclass(frozen=True)
class HostFacts:
    """One host; limits are (soft, hard) pairs, UNLIMITED where there is none.

    `cores` are in this process's affinity mask, `cpu_quota` is the cgroup's, `shm_free` is in bytes (None without
    /dev/shm), `gpus` counts those of NVIDIA's driver, visible or not. `address` is that of the host's own name, "" if
    unresolved; `reverse_lookup_s` are the seconds of the lookup from that address to a name.
    """

    name: str
    cores: int = 1
    total_cores: int = 1
    cpu_quota: int | None = None
    shm_free: int | None = None
    open_files: tuple[int, int] = (UNLIMITED, UNLIMITED)
    locked_memory: tuple[int, int] = (UNLIMITED, UNLIMITED)
    infiniband: tuple[str, ...] = ()
    gpus: int = 0
    interfaces: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    reverse_lookup_s: float = 0.0
    versions: Mapping[str, str | None] = field(default_factory=dict)

    def external_interfaces(self) -> dict[str, str]:
        """Return the address of every interface but loopback."""
        return {name: address for name, address in self.interfaces.items() if not is_loopback(address)}


@dataclass(frozen=True)
class MpiProgram:
    """An mpirun or mpiexec on PATH, with its MPI family and version."""

    program: str
    path: str
    family: Mpi
    version: str

    def __str__(self) -> str:
        return f"{self.path} ({mpi_name(self.family)} {self.version})".replace(" )", ")")


@dataclass(frozen=True)
class Mpi4pyProbe:
    """The MPI that mpi4py uses: its version string, and its library files."""

    library: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class InstallationFacts:
    """This Python and the MPIs on PATH; None for what is not installed.

    `python_on_path` is the `python` of PATH unless it is this one, "" for none. `torch` and `mpi4py` are error messages
    if the packages cannot be imported. `core_built_for` lists versions of torch.
    """

    versions: Mapping[str, str | None]
    host: HostFacts
    python: str = "python"
    abi_tag: str = ""
    python_on_path: str | None = None
    torch: TorchProbe | str | None = None
    horovod: BuildRecord | None = None
    mpi4py: Mpi4pyProbe | str | None = None
    mpi_programs: tuple[MpiProgram, ...] = ()
    srun_mpi_types: tuple[str, ...] | None = None
    is_master_unresolved: bool = False
    core_built_for: tuple[str, ...] = ()

    def mpi_program(self, name: str = "mpirun") -> MpiProgram | None:
        return next((each for each in self.mpi_programs if each.program == name), None)


def mpi_name(family: Mpi) -> str:
    return {"openmpi4": "Open MPI", "openmpi5": "Open MPI", "mpich": "MPICH"}.get(family, "an unknown MPI")


def collect_facts(environ: Mapping[str, str], topology: Topology | None) -> InstallationFacts:
    """Return all facts; takes as long as `import torch`, which runs in a subprocess."""
    installed = installed_versions()
    with ThreadPoolExecutor() as pool:
        torch = pool.submit(lambda: probe_torch(environ) if installed["torch"] else None)
        mpi4py = pool.submit(lambda: _probe_mpi4py(environ) if installed["mpi4py"] else None)
        horovod = pool.submit(_probe_horovod, environ)
        host = pool.submit(collect_host_facts)
        srun = pool.submit(_srun_mpi_types, environ)
        master = pool.submit(lambda: topology is not None and topology.address and not resolve(topology.address))
        mpi_programs = pool.submit(_find_mpi_programs, environ)
        return InstallationFacts(
            versions=installed,
            host=host.result(),
            python=sys.executable,
            abi_tag=str(sysconfig.get_config_var("SOABI") or ""),
            python_on_path=_python_on_path(environ),
            torch=torch.result(),
            horovod=horovod.result(),
            mpi4py=mpi4py.result(),
            mpi_programs=mpi_programs.result(),
            srun_mpi_types=srun.result(),
            is_master_unresolved=bool(master.result()),
            core_built_for=built_for(),
        )


def collect_host_facts() -> HostFacts:
    name = socket.gethostname()
    address = resolve(name)
    return HostFacts(
        name=name,
        cores=len(os.sched_getaffinity(0)),
        total_cores=os.cpu_count() or 1,
        cpu_quota=quota_cores(),
        shm_free=shutil.disk_usage(FOLDER).free if os.path.isdir(FOLDER) else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=tuple(sorted(path.name for path in INFINIBAND.glob("*"))),
        gpus=len(gpu_names()),
        interfaces=list_interfaces(),
        address=address,
        reverse_lookup_s=round(_time_reverse_lookup(address), 3),
        versions=installed_versions(),
    )


def installed_versions() -> dict[str, str | None]:
    """Return the installed versions without importing the packages; None for a missing one."""
    found = versions()
    packages = {name: found.get(name) if importlib.util.find_spec(name) else None for name in PACKAGES}
    return {"dualdist": __version__, "python": platform.python_version(), **packages, CORE: found[CORE]}


def may_use_gpus(environ: Mapping[str, str]) -> bool:
    """Return True if torch should find a GPU, judged without importing it: a driver, and not a CPU build."""
    build = (package_version("torch") or "").partition("+")[2]
    return bool(gpu_names()) and not hides_all(environ) and build != "cpu"


def resolve(name: str) -> str:
    """Return an address of `name`, preferably of IPv4, or ""."""
    try:
        return resolve_address(name)
    except (RendezvousError, UnicodeError):
        return ""


def _time_reverse_lookup(address: str) -> float:
    """Return the seconds of the reverse lookup that torch's TCPStore does for every client.

    The store sees IPv4 clients as IPv6-mapped addresses, which /etc/hosts lacks, so name servers are queried.
    """
    start = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo((address if ":" in address else f"::ffff:{address or LOOPBACK}", 0), 0)
    return time.monotonic() - start


def _limit(kind: int) -> tuple[int, int]:
    soft, hard = (UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(kind))
    return soft, hard


def _probe_horovod(environ: Mapping[str, str]) -> BuildRecord | None:
    """Return the build record, completed by importing Horovod where dualdist did not build it."""
    record = read_record()
    if record is None or record.gloo is not None:
        return record
    found = run_probe(HOROVOD_PROGRAM, environ, HOROVOD_TIMEOUT_S)
    return record if isinstance(found, str) else replace(record, **found)


def _probe_mpi4py(environ: Mapping[str, str]) -> Mpi4pyProbe | str:
    """Return mpi4py's MPI, or the last line of the error if it cannot be imported."""
    found = run_probe(MPI4PY_PROGRAM, environ, MPI4PY_TIMEOUT_S)
    return found if isinstance(found, str) else Mpi4pyProbe(found["library"], tuple(found["files"]))


def _find_mpi_programs(environ: Mapping[str, str]) -> tuple[MpiProgram, ...]:
    """Return the first mpirun and the first mpiexec on PATH."""
    programs = []
    for name in MPI_PROGRAMS:
        path = shutil.which(name, path=environ.get("PATH", os.defpath))
        if path is not None:
            _, output = run_tool([path, "--version"], environ, TOOL_TIMEOUT_S)
            version = MPI_VERSION.search(output)
            programs.append(MpiProgram(name, path, parse_mpi_version(output), version[1] if version else ""))
    return tuple(programs)


def _srun_mpi_types(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    srun = shutil.which("srun", path=environ.get("PATH", os.defpath))
    return None if srun is None else parse_srun_mpi_types(run_tool([srun, "--mpi=list"], environ, TOOL_TIMEOUT_S)[1])


def parse_srun_mpi_types(output: str) -> tuple[str, ...] | None:
    """Return the types that `srun --mpi=list` prints: one a line, or all versions of a plugin in one line."""
    heading, *rest = SRUN_HEADING.split(output)[1:] or [""]
    if not heading:
        return None
    lines = [line.partition("available:")[2] or line for line in rest[0].replace("srun:", "").splitlines()]
    return tuple(word for line in lines for word in line.replace(",", " ").split())


def _python_on_path(environ: Mapping[str, str]) -> str | None:
    """Return the `python` on PATH, "" for none, None for this Python.

    Folders are compared, since virtual environments may share one interpreter.
    """
    python = shutil.which("python", path=environ.get("PATH", os.defpath)) or ""
    own = {Path(folder).resolve() for folder in (Path(sys.executable).parent, sysconfig.get_path("scripts"))}
    return None if python and Path(python).parent.resolve() in own else python

"""Facts about this Python installation, the MPIs on PATH and this host; no job is started."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dualdist.diagnostics.trace_format import TIMELINE, find_write_problem
from dualdist.doctor.host import HostFacts, collect_host_facts, installed_versions, resolve
from dualdist.environments.env_values import get_value
from dualdist.horovod_build.probe import run_tool
from dualdist.horovod_build.record import BuildRecord, read_record
from dualdist.launch.execute import parse_mpi_version
from dualdist.launch.job import Mpi
from dualdist.topology import Topology
from dualdist.utils.package_probe import Mpi4pyProbe, TorchProbe, probe_horovod, probe_mpi4py, probe_torch

TIMEOUT_S = 15.0
MPI_PROGRAMS = ("mpirun", "mpiexec")
MPI_VERSION = re.compile(r"(?:\(Open ?MPI\)|\(OpenRTE\)|Version:|Version)\s*v?(\d+(?:\.\d+)+)")
# The heading of `srun --mpi=list`; newer Slurms say "plugin", and list the PMIx versions after the types.
SRUN_HEADING = re.compile(r"(MPI (?:plugin )?types are\.\.\.)")
# In torchvision's metadata: "torch (==2.13.0)" or "torch==2.13.0".
REQUIRED_TORCH = re.compile(r"torch\s*\(?==\s*([0-9][^\s;)]*)")


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
class InstallationFacts:
    """This Python and the MPIs on PATH; None for what is not installed.

    `python_on_path` is the `python` of PATH unless it is this one, "" for none. `torch` and `mpi4py` are error messages
    if the packages cannot be imported. `torchvision_requires` is the torch version that torchvision pins.
    `timeline_error` says why DUALDIST_TIMELINE cannot be written.
    """

    versions: Mapping[str, str | None]
    host: HostFacts
    python: str = "python"
    abi_tag: str = ""
    python_on_path: str | None = None
    torch: TorchProbe | str | None = None
    torchvision_requires: str | None = None
    horovod: BuildRecord | None = None
    mpi4py: Mpi4pyProbe | str | None = None
    mpi_programs: tuple[MpiProgram, ...] = ()
    srun_mpi_types: tuple[str, ...] | None = None
    is_master_unresolved: bool = False
    timeline_error: str = ""

    def mpi_program(self, name: str = "mpirun") -> MpiProgram | None:
        """Return the first program of this name on PATH."""
        return next((each for each in self.mpi_programs if each.program == name), None)


def mpi_name(family: Mpi) -> str:
    return {"openmpi4": "Open MPI", "openmpi5": "Open MPI", "mpich": "MPICH"}.get(family, "an unknown MPI")


def mpi_family(library: str) -> Mpi:
    """Return the family of an MPI from MPI_Get_library_version() or a Horovod build record."""
    if "Open MPI" in library:
        words = library.partition("Open MPI")[2].split()
        major = words[0].lstrip("v").partition(".")[0] if words else ""
        return "openmpi5" if major.isdecimal() and int(major) >= 5 else "openmpi4"
    is_mpich = any(name in library for name in ("MPICH", "Intel(R) MPI", "Intel MPI", "MVAPICH"))
    return "mpich" if is_mpich else "unknown"


def collect_facts(environ: Mapping[str, str], topology: Topology | None) -> InstallationFacts:
    """Return all facts; takes as long as `import torch`, which runs in a subprocess."""
    versions = installed_versions()
    with ThreadPoolExecutor() as pool:
        torch = pool.submit(lambda: probe_torch(environ) if versions["torch"] else None)
        mpi4py = pool.submit(lambda: probe_mpi4py(environ) if versions["mpi4py"] else None)
        horovod = pool.submit(_probe_horovod, environ)
        host = pool.submit(collect_host_facts)
        srun = pool.submit(_srun_mpi_types, environ)
        master = pool.submit(_is_master_unresolved, topology)
        mpi_programs = pool.submit(_find_mpi_programs, environ)
        timeline = get_value(environ, TIMELINE)
        return InstallationFacts(
            versions=versions,
            host=host.result(),
            python=sys.executable,
            abi_tag=str(sysconfig.get_config_var("SOABI") or ""),
            python_on_path=_python_on_path(environ),
            torch=torch.result(),
            torchvision_requires=_torchvision_requires(),
            horovod=horovod.result(),
            mpi4py=mpi4py.result(),
            mpi_programs=mpi_programs.result(),
            srun_mpi_types=srun.result(),
            is_master_unresolved=master.result(),
            timeline_error=find_write_problem(Path(timeline).absolute()) if timeline else "",
        )


def _probe_horovod(environ: Mapping[str, str]) -> BuildRecord | None:
    """Return the build record, completed by importing Horovod where dualdist did not build it."""
    record = read_record()
    if record is None or record.gloo is not None:
        return record
    probe = probe_horovod(environ)
    return (
        record if isinstance(probe, str) else replace(record, gloo=probe.gloo, mpi=probe.mpi, nccl=probe.nccl or None)
    )


def _find_mpi_programs(environ: Mapping[str, str]) -> tuple[MpiProgram, ...]:
    """Return each mpirun and mpiexec, in the order of PATH and without duplicates."""
    programs: dict[tuple[str, str], MpiProgram] = {}
    for name in MPI_PROGRAMS:
        for folder in filter(None, environ.get("PATH", os.defpath).split(os.pathsep)):
            path = shutil.which(name, path=folder)
            if path is not None and (name, os.path.realpath(path)) not in programs:
                _, output = run_tool([path, "--version"], environ, TIMEOUT_S)
                version = MPI_VERSION.search(output)
                program = MpiProgram(name, path, parse_mpi_version(output), version[1] if version else "")
                programs[name, os.path.realpath(path)] = program
    return tuple(programs.values())


def _srun_mpi_types(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    srun = shutil.which("srun", path=environ.get("PATH", os.defpath))
    return None if srun is None else parse_srun_mpi_types(run_tool([srun, "--mpi=list"], environ, TIMEOUT_S)[1])


def parse_srun_mpi_types(output: str) -> tuple[str, ...] | None:
    """Return the types that `srun --mpi=list` prints: one a line, or all versions of a plugin in one line."""
    heading, *rest = SRUN_HEADING.split(output)[1:] or [""]
    if not heading:
        return None
    lines = [line.partition("available:")[2] or line for line in rest[0].replace("srun:", "").splitlines()]
    return tuple(word for line in lines for word in line.replace(",", " ").split())


def _is_master_unresolved(topology: Topology | None) -> bool:
    return topology is not None and topology.address is not None and not resolve(topology.address)


def _python_on_path(environ: Mapping[str, str]) -> str | None:
    """Return the `python` on PATH, "" for none, None for this Python.

    Folders are compared, since virtual environments may share one interpreter.
    """
    python = shutil.which("python", path=environ.get("PATH", os.defpath)) or ""
    own = {Path(folder).resolve() for folder in (Path(sys.executable).parent, sysconfig.get_path("scripts"))}
    return None if python and Path(python).parent.resolve() in own else python


def _torchvision_requires() -> str | None:
    try:
        requirements = importlib.metadata.requires("torchvision") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((match[1] for line in requirements if (match := REQUIRED_TORCH.match(line))), None)

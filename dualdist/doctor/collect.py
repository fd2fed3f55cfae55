"""The edge: looks at this Python, at the MPIs on the path and at this host, and starts no job."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from dualdist.diagnostics.trace_format import TIMELINE, find_write_problem
from dualdist.doctor import host
from dualdist.doctor.facts import InstallationFacts, MpiStarter
from dualdist.environments.env_values import get_value
from dualdist.horovod_build.record import BuildRecord, read_record
from dualdist.launch.execute import parse_mpi_version
from dualdist.topology import Topology
from dualdist.utils.package_probe import Mpi4pyProbe, TorchProbe, probe_horovod, probe_mpi4py, probe_torch

ANSWER_S = 15.0
STARTERS = ("mpirun", "mpiexec")
VERSION = re.compile(r"(?:\(Open ?MPI\)|\(OpenRTE\)|Version:|Version)\s*v?(\d+(?:\.\d+)+)")
# Above the kinds, one a line; newer Slurms say "plugin", and tell the versions of PMIx after them.
MPI_HEADING = re.compile(r"(MPI (?:plugin )?types are\.\.\.)")
# Of torchvision's metadata: "torch (==2.13.0)" or "torch==2.13.0".
NEEDS_TORCH = re.compile(r"torch\s*\(?==\s*([0-9][^\s;)]*)")


def look(environ: Mapping[str, str], topology: Topology | None) -> InstallationFacts:
    """All facts; takes as long as `import torch`, in other processes."""
    installed = host.versions()
    with ThreadPoolExecutor() as pool:
        torch = pool.submit(lambda: probe_torch(environ) if installed["torch"] else None)
        mpi4py = pool.submit(lambda: probe_mpi4py(environ) if installed["mpi4py"] else None)
        horovod = pool.submit(_horovod, environ)
        here = pool.submit(host.look)
        srun = pool.submit(_srun_mpi, environ)
        master = pool.submit(_master_problem, topology)
        programs = _programs(environ.get("PATH", os.defpath))
        found = list(pool.map(lambda pair: _starter(pair[0], pair[1], environ), programs))
        said_torch: TorchProbe | str | None = torch.result()
        said_mpi4py: Mpi4pyProbe | str | None = mpi4py.result()
    return InstallationFacts(
        versions=installed,
        host=here.result(),
        python=sys.executable,
        abi=str(sysconfig.get_config_var("SOABI") or ""),
        python_on_path=_python_on_path(environ),
        torch=said_torch,
        vision_needs=_vision_needs(),
        horovod=horovod.result(),
        mpi4py=said_mpi4py,
        starters=tuple(found),
        srun_mpi=srun.result(),
        master_problem=master.result(),
        timeline_problem=find_write_problem(Path(timeline).absolute())
        if (timeline := get_value(environ, TIMELINE))
        else "",
    )


def _horovod(environ: Mapping[str, str]) -> BuildRecord | None:
    """Its record; one that dualdist did not build has none, and is asked, as long as it can be imported."""
    record = read_record()
    if record is None or record.gloo is not None:
        return record
    said = probe_horovod(environ)
    return record if isinstance(said, str) else replace(record, gloo=said.gloo, mpi=said.mpi, nccl=said.nccl or None)


def _programs(path: str) -> Iterator[tuple[str, str]]:
    """Each mpirun and mpiexec, by name and path, in the order of PATH; a folder that is on it twice counts once."""
    for program in STARTERS:
        seen = set()
        for folder in dict.fromkeys(path.split(os.pathsep)):
            found = shutil.which(program, path=folder) if folder else None
            if found is not None and (real := os.path.realpath(found)) not in seen:
                seen.add(real)
                yield program, found


def _starter(program: str, path: str, environ: Mapping[str, str]) -> MpiStarter:
    said = _output([path, "--version"], environ)
    version = VERSION.search(said)
    return MpiStarter(program, path, parse_mpi_version(said), version[1] if version else "")


def _srun_mpi(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The kinds of MPI that srun knows; None without a Slurm."""
    srun = shutil.which("srun", path=environ.get("PATH", os.defpath))
    return None if srun is None else kinds_of_mpi(_output([srun, "--mpi=list"], environ))


def kinds_of_mpi(said: str) -> tuple[str, ...] | None:
    """The kinds in what `srun --mpi=list` prints: a heading, then one a line, or all of a plug-in in one."""
    heading, *lines = MPI_HEADING.split(said)[1:] or [""]
    if not heading:
        return None
    told = [line.partition("available:")[2] or line for line in lines[0].replace("srun:", "").splitlines()]
    return tuple(word for line in told for word in line.replace(",", " ").split())


def _master_problem(topology: Topology | None) -> str:
    if topology is None or topology.address is None or host.resolved(topology.address):
        return ""
    return "this name does not resolve"


def _python_on_path(environ: Mapping[str, str]) -> str | None:
    """What `python` means in a shell, "" for nothing; None where it means this Python.

    Two environments may share one interpreter: it is the folder that tells them apart.
    """
    found = shutil.which("python", path=environ.get("PATH", os.defpath)) or ""
    own = {Path(folder) for folder in (Path(sys.executable).parent, sysconfig.get_path("scripts"))}
    is_own = bool(found) and any(Path(found).parent.resolve() == folder.resolve() for folder in own)
    return None if is_own else found


def _vision_needs() -> str | None:
    """The torch that the installed torchvision names."""
    try:
        needed = importlib.metadata.requires("torchvision") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((found[1] for line in needed if (found := NEEDS_TORCH.match(line))), None)


def _output(argv: list[str], environ: Mapping[str, str]) -> str:
    """What a program prints; nothing where it cannot be started, or does not end."""
    try:
        done = subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ANSWER_S,
            text=True,
            errors="replace",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout

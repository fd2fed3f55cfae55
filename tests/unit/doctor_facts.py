"""Facts of a healthy installation, and the findings for variations of them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dualdist.doctor.checks import Finding
from dualdist.doctor.diagnosis import Diagnosis, detect_topology, evaluate
from dualdist.doctor.facts import HostFacts, InstallationFacts, Mpi4pyProbe, MpiProgram
from dualdist.horovod_build.record import BuildRecord
from dualdist.utils.package_probe import TorchProbe

VERSIONS: dict[str, str | None] = {
    "dualdist": "1", "python": "3.11.7", "torch": "2.13.0+cpu", "torchvision": None, "horovod": "0.28.1",
    "mpi4py": "4.1.2",
}  # fmt: skip
HOROVOD = BuildRecord(horovod="0.28.1", torch="2.13.0+cpu", gloo=True, mpi=True, mpi_version="Open MPI 4.1.8")
OPENMPI4 = MpiProgram("mpirun", "/v/mpirun", "openmpi4", "4.1.8")
OPENMPI5 = MpiProgram("mpirun", "/v/mpirun", "openmpi5", "5.0.11")
MPICH = MpiProgram("mpirun", "/usr/bin/mpirun", "mpich", "4.0.2")
HOST = HostFacts(
    "vm", cores=8, total_cores=8, shm_free=1 << 34, interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    address="10.0.0.1",
)  # fmt: skip
FACTS = InstallationFacts(
    versions=VERSIONS, host=HOST, python="/v/python", abi_tag="cpython-311-x86_64-linux-gnu",
    torch=TorchProbe("2.13.0+cpu"), horovod=HOROVOD, mpi4py=Mpi4pyProbe("Open MPI v4.1.8, package"),
    mpi_programs=(OPENMPI4,),
)  # fmt: skip


RECORDS = json.loads((Path(__file__).parent / "launcher_env.json").read_text())
VALID = [name for name, rows in RECORDS.items() if "error" not in rows[0]["expect"]]


def recorded(table: str, index: int = 0) -> dict[str, str]:
    return dict(RECORDS[table][index]["env"])


def with_facts(**changes: Any) -> InstallationFacts:
    return replace(FACTS, **changes)


def _with_part(part: str, facts: InstallationFacts = FACTS, **changes: Any) -> InstallationFacts:
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


with_horovod, with_host, with_torch = (partial(_with_part, part) for part in ("horovod", "host", "torch"))


def with_python_core(*built_for: str) -> InstallationFacts:
    return with_versions(with_facts(core_built_for=built_for), core="Python")


def with_versions(facts: InstallationFacts = FACTS, **versions: str | None) -> InstallationFacts:
    return replace(facts, versions={**facts.versions, **versions})


def diagnosis(
    environ: Mapping[str, str] | None = None, facts: InstallationFacts = FACTS, ranks: int | None = None
) -> Diagnosis:
    environ = {"OMP_NUM_THREADS": "1", **(environ or {})}
    return evaluate(detect_topology(environ), environ, facts, ranks)


def levels(
    environ: Mapping[str, str] | None = None, facts: InstallationFacts = FACTS, ranks: int | None = None
) -> dict[str, str]:
    """Return the level of each finding by name."""
    return {each.name: each.level for each in diagnosis(environ, facts, ranks).findings}


def finding_named(name: str, result: Diagnosis) -> Finding:
    (finding,) = [each for each in result.findings if each.name == name]
    return finding


GPUS = with_host(with_torch(cuda="13.0", nccl="2.27.3", gpus=4, version="2.13.0"), gpus=4)
GPUS = with_versions(replace(GPUS, horovod=replace(HOROVOD, torch="2.13.0", nccl="2.27.3")), torch="2.13.0")
TORCHRUN, MPIRUN = recorded("torchrun"), recorded("openmpi-4.1.4_mpirun")

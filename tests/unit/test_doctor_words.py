"""The doctor's findings about an installation and a launch: tables of facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doctor_facts import (
    FACTS,
    GPUS,
    HOROVOD,
    MPICH,
    MPIRUN,
    OPENMPI4,
    OPENMPI5,
    RECORDS,
    TORCHRUN,
    diagnosis,
    found,
    horovod,
    on_host,
    other,
    recorded,
    the,
    with_torch,
    with_versions,
)

from dualdist.cli.doctor import Painter, lines
from dualdist.doctor import to_json
from dualdist.doctor.collect import kinds_of_mpi
from dualdist.doctor.facts import InstallationFacts, MpiStarter, family_of
from dualdist.doctor.findings import fixes
from dualdist.environments import detect
from dualdist.utils.package_probe import Mpi4pyProbe

# A launch that is sound, and yet not what a training wants: a script or a shell in an allocation of several tasks.
ALONE = {
    "slurm_sbatch_plain": "warning",
    "slurm_batch_more": "warning",
    "slurm_batch_from_step_more": "warning",
    "slurm_salloc_command_more": "info",
    "slurm_interactive_step_more": "info",
}


@pytest.mark.parametrize("table", [name for name, rows in RECORDS.items() if "error" not in rows[0]["expect"]])
def test_a_sound_launch_on_a_sound_installation_is_healthy(table: str) -> None:
    environ, facts = recorded(table), FACTS
    if "mpich" in table or "intel" in table:
        facts = replace(
            FACTS,
            starters=(MPICH,),
            mpi4py=Mpi4pyProbe("MPICH Version: 4.0.2"),
            horovod=replace(HOROVOD, mpi_version="MPICH 4.0.2"),
        )
    told = diagnosis(environ, facts)
    expected = {"slurm-one-process": ALONE[table]} if table in ALONE else {}
    if table == "slurm_srun_torchrun_more":  # of two nodes that were one host
        expected = {"master-is-loopback": "error"}
    assert {each.name: each.level for each in told.findings} == expected
    assert told.topology == detect(environ)
    assert [name for name, backend in told.backends.items() if not backend.available] == []


BARE = with_versions(other(torch=None, horovod=None, mpi4py=None), torch=None, horovod=None, mpi4py=None)
VISION = with_versions(other(vision_needs="2.13.0"), torchvision="0.28.0")
ASKED = {"DUALDIST_BACKEND": "horovod"}

INSTALLATIONS = [
    ("healthy", FACTS, {}, {}),
    ("healthy with GPUs", GPUS, {}, {}),
    ("nothing", BARE, {}, {"torch-missing": "error", "horovod-missing": "info"}),
    ("broken torch", other(torch="ImportError: libc10.so"), {}, {"torch-broken": "error"}),
    ("old torch", with_versions(with_torch(version="2.0.1"), torch="2.0.1"), {},
     {"torch-old": "error", "horovod-other-torch": "warning"}),
    ("two torches", with_torch(version="2.12.0+cpu"), {}, {"torch-twice": "warning"}),
    ("no distributed", with_torch(has_distributed=False), {}, {"torch-without-distributed": "warning"}),
    ("no distributed, wanted", with_torch(has_distributed=False), {"DUALDIST_BACKEND": "native"},
     {"torch-without-distributed": "error"}),
    ("old Python", with_versions(python="3.9.2"), {}, {"python-old": "error"}),
    ("another Python on PATH", other(python_on_path="/usr/bin/python"), {}, {"python-on-path": "info"}),
    ("no Python on PATH", other(python_on_path=""), {}, {"python-on-path": "info"}),
    ("torchvision that fits", replace(VISION, torch=replace(VISION.torch, has_vision_operators=True)), {}, {}),
    ("torchvision of another torch", replace(VISION, vision_needs="2.9.0"), {}, {"torchvision-other-torch": "warning"}),
    ("torchvision of another build", replace(VISION, torch=replace(VISION.torch, has_vision_operators=False)), {},
     {"torchvision-operators": "warning"}),
    ("a CPU torch beside GPUs", on_host(gpus=2), {}, {"torch-without-cuda": "warning"}),
    ("a driver that is too old", replace(GPUS, torch=replace(GPUS.torch, gpus=0)), {},
     {"torch-sees-no-gpu": "warning"}),
    ("GPUs that are hidden", replace(GPUS, torch=replace(GPUS.torch, gpus=0)), {"CUDA_VISIBLE_DEVICES": ""},
     {"gpus-hidden": "info"}),
    ("GPUs without NCCL", replace(GPUS, torch=replace(GPUS.torch, nccl=None)), {}, {"torch-without-nccl": "warning"}),
    ("no Horovod", with_versions(other(horovod=None), horovod=None), {}, {"horovod-missing": "info"}),
    ("no Horovod, wanted", with_versions(other(horovod=None), horovod=None), ASKED, {"horovod-missing": "error"}),
    ("Horovod of another torch", horovod(torch="2.12.0+cpu"), {}, {"horovod-other-torch": "warning"}),
    ("Horovod of a CUDA build", horovod(torch="2.13.0+cu130"), {}, {"horovod-other-torch": "warning"}),
    ("Horovod of another torch, wanted", horovod(torch="2.12.0"), ASKED, {"horovod-other-torch": "error"}),
    ("Horovod of PyPI's torch", with_versions(with_torch(horovod(torch="2.13.0+cu130"), version="2.13.0"),
     torch="2.13.0"), {}, {}),
    ("Horovod that says nothing", horovod(torch=None, mpi_version=None), {}, {}),
    ("Horovod of another Python", horovod(python="cpython-39-x86_64-linux-gnu"), {},
     {"horovod-other-python": "warning"}),
    ("Horovod of this Python", horovod(python=FACTS.abi), {}, {}),
    ("Horovod of another MPI", horovod(mpi_version="MPICH 4.0.2"), {}, {"horovod-other-mpi": "warning"}),
    ("Horovod of another MPI, under it", horovod(mpi_version="MPICH 4.0.2"), MPIRUN | ASKED,
     {"horovod-other-mpi": "error"}),
    ("Horovod without NCCL", replace(GPUS, horovod=replace(HOROVOD, torch="2.13.0")), {},
     {"horovod-without-nccl": "warning"}),
    ("a foreign Horovod that says nothing", replace(GPUS, horovod=replace(HOROVOD, torch="2.13.0", gloo=None)), {}, {}),
    ("Horovod without Gloo", horovod(gloo=False), {}, {"horovod-without-gloo": "warning"}),
    ("Horovod without Gloo, wanted", horovod(gloo=False), TORCHRUN | ASKED, {"horovod-without-gloo": "error"}),
    ("Open MPI 5", other(starters=(OPENMPI5,), mpi4py=Mpi4pyProbe("Open MPI v5.0.11"),
     horovod=replace(HOROVOD, mpi_version="Open MPI 5.0.11")), {}, {"horovodrun-openmpi-5": "warning"}),
    ("Open MPI 5, patched", other(starters=(OPENMPI5,), mpi4py=Mpi4pyProbe("Open MPI v5.0.11"),
     horovod=replace(HOROVOD, mpi_version="Open MPI 5.0.11", patches=("horovod/runner/mpi_run.py: x",))), {},
     {"horovodrun-openmpi-5": "info"}),
    ("Open MPI 5 and a foreign Horovod", other(starters=(OPENMPI5,), mpi4py=Mpi4pyProbe("Open MPI v5.0.11"),
     horovod=replace(HOROVOD, gloo=None, mpi=None, mpi_version=None)), {}, {"horovodrun-openmpi-5": "warning"}),
    ("Open MPI 5 and a Horovod without MPI", other(starters=(OPENMPI5,), mpi4py=Mpi4pyProbe("Open MPI v5.0.11"),
     horovod=replace(HOROVOD, mpi=False, mpi_version=None)), {}, {}),
    ("mpi4py of another MPI", other(mpi4py=Mpi4pyProbe("MPICH Version: 4.0.2")), {}, {"mpi4py-other-mpi": "warning"}),
    ("mpi4py of another MPI, under it", other(mpi4py=Mpi4pyProbe("MPICH Version: 4.0.2")), MPIRUN,
     {"mpi4py-other-mpi": "error"}),
    ("mpi4py of an MPI that is not known", other(mpi4py=Mpi4pyProbe("Fujitsu MPI")), {}, {}),
    ("broken mpi4py", other(mpi4py="RuntimeError: cannot load MPI library"), {}, {"mpi4py-broken": "warning"}),
    ("broken mpi4py, wanted", other(mpi4py="RuntimeError: cannot load"), MPIRUN, {"mpi4py-broken": "error"}),
    ("two MPIs, one behind the other", other(starters=(OPENMPI4, MPICH)), {}, {"two-mpis": "info"}),
    ("two MPIs, mixed", other(starters=(OPENMPI4, replace(MPICH, program="mpiexec"))), {}, {"two-mpis": "warning"}),
    ("one MPI, by two names", other(starters=(OPENMPI4, replace(OPENMPI4, program="mpiexec"))), {}, {}),
    ("no MPI", other(starters=()), {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "environ", "expected"), [row[1:] for row in INSTALLATIONS], ids=[r[0] for r in INSTALLATIONS]
)
def test_an_installation_is_judged_by_what_would_happen(
    facts: InstallationFacts, environ: dict[str, str], expected: Any
) -> None:
    assert found(environ, facts) == expected


def test_findings_say_what_was_seen_and_what_to_type() -> None:
    told = the(
        "torchvision-operators", diagnosis({}, replace(VISION, torch=replace(VISION.torch, has_vision_operators=False)))
    )
    assert "torchvision 0.28.0" in told.seen
    assert "nms does not exist" in told.why
    assert "torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu" in told.do
    assert "--no-deps" in told.fix
    told = the("shm-too-small", diagnosis({}, on_host(shm_free=64 << 20)))
    assert "has 64 MiB free, which should be 96 MiB or more for 2 ranks" in told.seen
    told = the("thread-oversubscription", diagnosis({"OMP_NUM_THREADS": "4"}, on_host(cores=4, all_cores=4), 2))
    assert "export OMP_NUM_THREADS=2" in told.do
    told = the("mpi4py-other-mpi", diagnosis({}, other(mpi4py=Mpi4pyProbe("MPICH Version: 4.0.2", ("/l/libmpi.so",)))))
    assert "/l/libmpi.so" in told.seen
    assert "/v/mpirun (Open MPI 4.1.8)" in told.seen
    told = the("slurm-one-process", diagnosis(recorded("slurm_sbatch_plain")))
    assert "SLURM_NTASKS=4" in told.seen
    assert "srun -n 4 python script.py" in told.do


def test_the_exit_code_is_that_of_the_worst_and_it_comes_first() -> None:
    mild = with_versions(other(horovod=None, starters=(OPENMPI4, MPICH)), horovod=None)
    assert diagnosis({}, FACTS).exit_code == 0
    assert diagnosis({}, mild).exit_code == 0
    worse = on_host(mild, shm_free=0)
    assert diagnosis({}, worse).exit_code == 1
    worst = replace(worse, torch="no torch")
    told = diagnosis({}, worst)
    assert (told.exit_code, told.findings[0].level, told.findings[-1].level) == (2, "error", "info")
    assert to_json(told)["exit_code"] == 2


def test_only_what_is_safe_can_be_fixed_and_each_command_runs_once() -> None:
    bare = diagnosis({}, BARE)
    assert [fix.line for fix in fixes(bare.findings)] == ["/v/python -m pip install torch"]
    broken = horovod(torch="2.12.0", python="cpython-39", gloo=False)
    told = fixes(diagnosis(ASKED, broken).findings)
    assert [fix.line for fix in told] == ["/v/python -m dualdist install-horovod --force"]
    assert len(told[0].findings) == 3
    unsafe = on_host(shm_free=0, files=(9, 9), address="")
    assert fixes(diagnosis({}, unsafe).findings) == []


def test_a_broken_environment_has_no_place_and_will_fail() -> None:
    told = diagnosis({"RANK": "0"})
    assert (told.topology, told.exit_code, to_json(told)["topology"]) == (None, 2, None)
    assert "WORLD_SIZE not set" in told.findings[0].seen


def test_the_table_says_what_the_json_says() -> None:
    told = diagnosis(recorded("slurm_sbatch_openmpi4", 3), horovod(torch="1"))
    text = "\n".join(lines(told, Painter(_Nowhere(), {})))
    for words in (
        "rank 3 of 4, local rank 1, node 1 (inferred)",
        "by mpirun",
        "not horovod: built for torch 1",
        "warning",
    ):
        assert all(part in text for part in words.split(", ")), text
    assert "unknown: the variables are broken" in "\n".join(lines(diagnosis({"RANK": "0"}), Painter(_Nowhere(), {})))


class _Nowhere:
    """A stream that is no terminal."""

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("library", "family"),
    [
        ("Open MPI v4.1.8, package: Open MPI user@localhost", "openmpi4"),
        ("Open MPI v5.0.11, package: Open MPI", "openmpi5"),
        ("Open MPI 4.1.8", "openmpi4"),
        ("MPICH Version:\t4.0.2\nMPICH Release date", "mpich"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", "mpich"),
        ("MVAPICH2 2.3.7", "mpich"),
        ("Fujitsu MPI Library 4.0.1", "unknown"),
        ("", "unknown"),
    ],
)
def test_an_mpi_is_known_by_what_it_calls_itself(library: str, family: str) -> None:
    assert family_of(library) == family


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\n"
         "specific pmix plugin versions available: pmix_v4",
         ("cray_shasta", "none", "pmi2", "pmix", "pmix_v4")),
        ("srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: openmpi\n", ("none", "pmi2", "openmpi")),
        ("srun: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_kinds_that_srun_knows_are_read(said: str, kinds: tuple[str, ...] | None) -> None:
    assert kinds_of_mpi(said) == kinds


def test_a_starter_says_whose_it_is() -> None:
    assert str(OPENMPI4) == "/v/mpirun (Open MPI 4.1.8)"
    assert str(MpiStarter("mpirun", "/x", "unknown", "")) == "/x (an unknown MPI)"

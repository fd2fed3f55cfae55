"""Which backend and which controller are chosen, from the environment alone."""

from __future__ import annotations

import pytest
import torch

from dualdist.backends.base import InitContext
from dualdist.backends.horovod import select_controller
from dualdist.errors import UnsupportedError, UsageError
from dualdist.rendezvous.backend_selection import backend_under_mpi, check_choice, select_backend
from dualdist.topology import Topology


def topology(launcher: str, size: int = 2, *, mpi: bool = False) -> Topology:
    return Topology(0, size, 0, size, 0, 1, launcher, "X", mpi=mpi)


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("none", "single"),
        ("torchrun", "native"),
        ("srun", "native"),
        ("spawn", "native"),
        ("env", "native"),
        ("override", "native"),
        ("flux", "native"),
        ("horovodrun", "horovod"),
    ],
)
def test_each_launcher_has_its_backend(launcher: str, expected: str) -> None:
    assert select_backend("auto", topology(launcher)) == expected


@pytest.mark.parametrize(
    ("horovod", "mpi4py", "gpu", "expected"),
    [
        (True, True, True, "horovod"),
        (True, True, False, "horovod"),
        (False, True, False, "mpi"),
        (False, True, True, "native"),
        (False, False, False, "native"),
    ],
)
def test_mpirun_means_mpi_where_it_helps(horovod: bool, mpi4py: bool, gpu: bool, expected: str) -> None:
    assert backend_under_mpi(horovod, mpi4py, has_gpu=gpu) == expected


@pytest.mark.parametrize("launcher", ["none", "torchrun", "horovodrun", "mpirun"])
@pytest.mark.parametrize("asked", ["native", "horovod", "mpi"])
def test_what_is_asked_for_is_taken(launcher: str, asked: str) -> None:
    assert select_backend(asked, topology(launcher)) == asked


def controller(transport: str, job: Topology, environ: dict[str, str]) -> str:
    return select_controller(InitContext(job, environ, transport, torch.device("cpu"), 5.0, "key"))


@pytest.mark.parametrize(
    ("transport", "environ", "mpi", "size", "expected"),
    [
        pytest.param("", {}, False, 2, "gloo", id="no MPI started"),
        pytest.param("gloo", {}, True, 2, "gloo", id="asked for"),
        pytest.param("mpi", {}, True, 2, "mpi", id="asked for and started"),
        pytest.param("", {"HOROVOD_CONTROLLER": "gloo"}, True, 2, "gloo", id="by Horovod's own variable"),
        pytest.param("mpi", {"HOROVOD_CONTROLLER": "gloo"}, True, 2, "mpi", id="ours before Horovod's"),
        pytest.param("mpi", {}, False, 1, "mpi", id="an MPI of one starts itself"),
        pytest.param("nccl", {}, False, 2, "gloo", id="NCCL needs a controller too"),
    ],
)
def test_horovods_controller(transport: str, environ: dict[str, str], mpi: bool, size: int, expected: str) -> None:
    assert controller(transport, topology("X", size, mpi=mpi), environ) == expected


def test_mpi_is_refused_where_the_launcher_starts_none() -> None:
    with pytest.raises(UnsupportedError, match=r"torchrun.*mpirun.*DUALDIST_TRANSPORT=gloo"):
        controller("mpi", topology("torchrun"), {})


def test_a_wrong_choice_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"'gloom'.* gloo, mpi .*DUALDIST_TRANSPORT\); did you mean 'gloo'"):
        check_choice("gloom", ("", "gloo", "mpi"), "transport", "DUALDIST_TRANSPORT")

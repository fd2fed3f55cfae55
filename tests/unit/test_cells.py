"""Which contenders a comparison has, and which of them cannot run here, with the reason."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from dualdist.backends.availability import Availability
from dualdist.bench.compare.matrix import (
    Cell,
    MatrixFacts,
    RefusedCell,
    baseline_cells,
    expand_configs,
    refusal_reason,
    split_runnable,
)
from dualdist.bench.jobs import MeasurementSettings, RunConfig
from dualdist.cli import compare
from dualdist.cli.compare_request import cells_of
from dualdist.errors import UsageError
from dualdist.launch.launchers import Site

SITE = Site("/v/python", {name: f"/v/{name}" for name in ("torchrun", "mpirun", "horovodrun")}, "/v", "openmpi4")
HERE = Availability(True, "1", "")
HOROVOD = replace(HERE, gloo=True, mpi=True, nccl=None)
FACTS = MatrixFacts(0, "auto", {"native": HERE, "horovod": HOROVOD, "mpi": HERE}, is_in_slurm=False)
GPUS = replace(FACTS, gpus=2)


def reason(words: str, facts: MatrixFacts = FACTS, site: Site = SITE) -> str | None:
    launcher, backend, transport = words.split()
    return refusal_reason(RunConfig(backend, transport, launcher), MeasurementSettings(2), site, facts)


def test_what_is_left_open_is_every_transport_by_the_launcher_that_fits_it() -> None:
    found = [
        f"{each.launcher} {each.backend} {each.transport}"
        for each in expand_configs(None, ["native", "horovod"], None, {})
    ]
    assert found == [
        "torchrun native gloo",
        "torchrun native shm",
        "torchrun native nccl",
        "torchrun horovod gloo",
        "mpirun horovod mpi",
        "torchrun horovod nccl",
    ]
    assert {each.launcher for each in expand_configs(None, ["native"], None, {"SLURM_JOB_ID": "7"})} == {"srun"}


def test_every_combination_that_was_asked_for_is_a_cell_and_none_is_dropped() -> None:
    places = expand_configs(["torchrun", "mpirun"], ["native", "mpi"], ["shm", "mpi"], {})
    cells, refused = split_runnable(places, MeasurementSettings(2), SITE, FACTS)
    assert len(places) == 8
    assert [cell.config for cell in cells] == [
        RunConfig("native", "shm", "torchrun"),
        RunConfig("native", "shm", "mpirun"),
        RunConfig("mpi", "mpi", "mpirun"),
    ]
    assert len(refused) == 5
    assert all(each.reason for each in refused)


@pytest.mark.parametrize(
    "words", ["torchrun native shm", "mpirun horovod mpi", "horovodrun horovod gloo", "spawn native gloo"]
)
def test_what_can_run_is_not_refused(words: str) -> None:
    assert reason(words) is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("torchrun horovod mpi", "needs a launcher that starts MPI, not torchrun"),
        ("torchrun native mpi", "expected one of gloo, shm, nccl for the backend native, not mpi"),
        ("srun native shm", "srun was not found"),
        ("torchrun native nccl", "torch sees no GPU here"),
        ("python native shm", "plain python starts one rank"),
    ],
)
def test_a_place_that_cannot_be_had_is_refused_with_the_reason(words: str, told: str) -> None:
    assert told in str(reason(words))


def test_reasons_come_from_what_is_installed() -> None:
    missing = replace(FACTS, backends={**FACTS.backends, "mpi": Availability(False, None, "mpi4py is not installed")})
    assert reason("mpirun mpi mpi", missing) == "mpi4py is not installed"
    without = replace(FACTS, backends={**FACTS.backends, "horovod": replace(HOROVOD, mpi=False, gloo=False)})
    assert "built without MPI" in str(reason("mpirun horovod mpi", without))
    assert "built without Gloo" in str(reason("torchrun horovod gloo", without))
    assert "Open MPI 5" in str(reason("horovodrun-mpi horovod mpi", site=replace(SITE, mpi="openmpi5")))
    srun = replace(SITE, tools={**SITE.tools, "srun": "/v/srun"})
    assert "no Slurm allocation" in str(reason("srun native shm", site=srun))
    assert reason("srun native shm", replace(FACTS, is_in_slurm=True), srun) is None
    assert "spawn is one command a rank" in str(reason("spawn native shm", replace(FACTS, is_script=True)))


def test_gpus_decide_between_nccl_and_the_others() -> None:
    assert reason("torchrun native nccl", GPUS) is None
    assert "add --device cpu" in str(reason("torchrun native shm", GPUS))
    assert "torch sees 1, and there are 2 ranks" in str(reason("torchrun native nccl", replace(GPUS, gpus=1)))
    assert reason("torchrun native shm", replace(GPUS, device="cpu")) is None
    assert "with --device cpu" in str(reason("torchrun native nccl", replace(GPUS, device="cpu")))
    assert "install-horovod --gpu" in str(reason("torchrun horovod nccl", GPUS))


def test_raw_horovod_runs_where_a_horovod_runs_and_says_where_it_cannot() -> None:
    cells = [Cell("dualdist", RunConfig("horovod", "mpi", "mpirun"))]
    found = list(baseline_cells(["ddp", "hvd", "none", "one"], cells, FACTS))
    assert [each.label for each in found if isinstance(each, Cell)] == [
        "DDP over gloo (torchrun)",
        "raw Horovod over mpi (mpirun)",
        "no communication",
        "one rank",
    ]
    (alone,) = baseline_cells(["hvd"], [], FACTS)
    assert isinstance(alone, RefusedCell)


def asked(*words: str) -> list[Cell]:
    parser = argparse.ArgumentParser()
    compare.configure(parser)
    args = parser.parse_args(["--device", "cpu", "--backends", "native", *words])
    return cells_of(args, SITE, MeasurementSettings(2))[0]


def test_references_are_launched_once_and_unknown_ones_refused_beside_a_script_too() -> None:
    kinds = [cell.kind for cell in asked("--transports", "gloo", "--baselines", "ddp,one,ddp")]
    assert kinds == ["dualdist", "ddp", "one"]
    assert [cell.kind for cell in asked("--transports", "gloo", "--script", "x.py")] == ["dualdist", "one"]
    for script in ((), ("--script", "x.py")):
        with pytest.raises(UsageError, match="baseline 'hvt': expected one of ddp"):
            asked("--baselines", "hvt", *script)
    with pytest.raises(UsageError, match="--baselines one,ddp: beside a script only `one` can run"):
        asked("--baselines", "one,ddp", "--script", "x.py")


def test_nothing_is_launched_where_no_contender_is_left_and_the_reasons_are_told() -> None:
    with pytest.raises(UsageError) as told:
        asked("--transports", "nccl,mpi")
    head, *reasons = str(told.value).splitlines()
    assert head == "no contender can run here:"
    assert [line.split(":")[0].strip() for line in reasons] == [
        "native over nccl (torchrun)",
        "native over mpi (mpirun)",
    ]
    assert "torch sees no GPU" in reasons[0]


@pytest.mark.parametrize(
    ("backends", "transports", "launchers", "told"),
    [
        (["nativ"], None, None, "backend 'nativ': expected one of native"),
        (["native"], ["tcp"], None, "transport 'tcp': expected one of gloo"),
        (["native"], None, ["torchrn"], "did you mean 'torchrun'"),
    ],
)
def test_names_that_nobody_has_are_refused(
    backends: list[str], transports: list[str] | None, launchers: list[str] | None, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        expand_configs(launchers, backends, transports, {})


def test_labels_and_keys_tell_cells_apart() -> None:
    place = RunConfig("native", "shm", "torchrun")
    cells = [Cell("dualdist", place), Cell("dualdist", place, copy=1), Cell("dualdist", place, slow=1.05, copy=2)]
    assert [cell.label for cell in cells] == [
        "native over shm (torchrun)",
        "native over shm (torchrun, again)",
        "native over shm (torchrun, slowed by 5%)",
    ]
    assert len({cell.key for cell in cells}) == 3
    assert [cell.is_contender for cell in cells] == [True, False, False]

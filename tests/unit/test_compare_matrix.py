"""Contenders of a comparison: combinations, baselines, and the reasons why some cannot run here."""

import argparse
from dataclasses import replace

import pytest

from dualdist.backends.registry import Availability
from dualdist.bench.compare.runner import Contender, RefusedContender
from dualdist.bench.jobs import MachineFacts, MeasurementSettings, RunConfig, expand_configs, refusal_reasons
from dualdist.bench.placement import Placement
from dualdist.cli import compare
from dualdist.cli.compare import select_contenders
from dualdist.errors import UsageError
from dualdist.launch.job import Host, Site

SITE = Site("/v/python", {name: f"/v/{name}" for name in ("torchrun", "mpirun", "horovodrun")}, "/v", "openmpi4")
SETTINGS = MeasurementSettings(2, SITE)
HERE = Availability(True, "1", "")
HOROVOD = replace(HERE, gloo=True, mpi=True, nccl=None)
FACTS = MachineFacts(0, {"native": HERE, "horovod": HOROVOD, "mpi": HERE}, is_in_slurm=False)
GPUS = replace(FACTS, gpus=2)


def test_by_default_every_transport_runs_by_the_launcher_that_fits_it() -> None:
    found = expand_configs([], ["native", "horovod"], [], {})
    assert [(each.launcher, each.backend, each.transport) for each in found] == [
        *(("torchrun", "native", transport) for transport in ("shm", "gloo", "nccl")),
        *(("torchrun", "horovod", "gloo"), ("mpirun", "horovod", "mpi"), ("torchrun", "horovod", "nccl")),
    ]
    assert {each.launcher for each in expand_configs([], ["native"], [], {"SLURM_JOB_ID": "7"})} == {"srun"}


def with_backend(name: str, found: Availability) -> MachineFacts:
    return replace(FACTS, backends={**FACTS.backends, name: found})


IN_SLURM = replace(SITE, tools={**SITE.tools, "srun": "/v/srun"})


@pytest.mark.parametrize(
    ("words", "facts", "site", "expected"),
    [
        *((words, FACTS, SITE, None) for words in
          ("torchrun native shm", "mpirun horovod mpi", "horovodrun horovod gloo", "spawn native gloo")),
        ("torchrun horovod mpi", FACTS, SITE, "needs a launcher that starts MPI, not torchrun"),
        ("torchrun native mpi", FACTS, SITE, "expected one of shm, gloo, nccl for the backend native, not mpi"),
        ("srun native shm", FACTS, SITE, "srun was not found"),
        ("torchrun native nccl", FACTS, SITE, "torch sees no GPU here"),
        ("python native shm", FACTS, SITE, "plain python starts one rank"),
        ("mpirun mpi mpi", with_backend("mpi", Availability(False, None, "no mpi4py")), SITE, "no mpi4py"),
        ("mpirun horovod mpi", with_backend("horovod", replace(HOROVOD, mpi=False)), SITE, "built without MPI"),
        ("torchrun horovod gloo", with_backend("horovod", replace(HOROVOD, gloo=False)), SITE, "built without Gloo"),
        ("horovodrun-mpi horovod mpi", FACTS, replace(SITE, mpi="openmpi5"), "Open MPI 5"),
        ("srun native shm", FACTS, IN_SLURM, "no Slurm allocation"),
        ("srun native shm", replace(FACTS, is_in_slurm=True), IN_SLURM, None),
        ("spawn native shm", replace(FACTS, is_script=True), SITE, "a script does not spawn its ranks"),
        ("torchrun native nccl", GPUS, SITE, None),
        ("torchrun native shm", GPUS, SITE, None),
        ("torchrun native nccl", replace(GPUS, gpus=1), SITE, "torch sees 1, and there are 2 ranks"),
        ("torchrun horovod nccl", GPUS, SITE, "install-horovod --gpu"),
    ],
)  # fmt: skip
def test_a_configuration_runs_or_is_refused_with_the_reason(
    words: str, facts: MachineFacts, site: Site, expected: str | None
) -> None:
    launcher, backend, transport = words.split()
    found = refusal_reasons([RunConfig(backend, transport, launcher)], MeasurementSettings(2, site), facts)
    assert not found if expected is None else expected in str(found)


@pytest.mark.parametrize(
    ("gpus", "words", "expected"),
    [
        ((2, 1), "native nccl", None),
        ((3, 0), "native nccl", "torch sees 2 (3 on a, 0 on b), and there are 3 ranks"),
        ((0, 0), "native nccl", "torch sees no GPU"),
        ((0, 0), "native shm", None),
    ],
)
def test_gpus_are_counted_by_host(gpus: tuple[int, int], words: str, expected: str | None) -> None:
    backend, transport = words.split()
    placement = Placement((Host("a", 2), Host("b", 1)), gpus=gpus)
    facts = replace(FACTS, gpus=placement.usable_gpus)
    settings = MeasurementSettings(3, SITE, placement=placement)
    found = refusal_reasons([RunConfig(backend, transport, "torchrun")], settings, facts)
    assert not found if expected is None else expected in str(found)


def test_shared_memory_needs_two_ranks_of_one_host() -> None:
    settings = MeasurementSettings(2, SITE, placement=Placement((Host("a", 1), Host("b", 1))))
    assert "shm needs two ranks on one host" in str(
        refusal_reasons([RunConfig("native", "shm", "torchrun")], settings, FACTS)
    )


def selected(*words: str) -> tuple[list[Contender], list[RefusedContender]]:
    parser = argparse.ArgumentParser()
    compare.configure(parser)
    args = parser.parse_args(["--device", "cpu", "--backends", "native", *words])
    return select_contenders(args, SETTINGS)


def test_baselines_run_once_and_unknown_ones_are_refused_also_with_a_script() -> None:
    contenders, refused = selected("--transports", "gloo", "--baselines", "ddp,one,ddp,hvd")
    assert [each.method for each in contenders] == ["dualdist", "ddp", "one"]
    assert [(each.contender.method, "needs a candidate" in each.reason) for each in refused] == [("hvd", True)]
    contenders, _ = selected("--transports", "gloo", "--script", "x.py")
    assert [each.method for each in contenders] == ["dualdist", "one"]
    for script in ((), ("--script", "x.py")):
        with pytest.raises(UsageError, match="baseline 'hvt': expected one of ddp"):
            selected("--baselines", "hvt", *script)
    with pytest.raises(UsageError, match="--baselines one,ddp: with a script only `one` can run"):
        selected("--baselines", "one,ddp", "--script", "x.py")


def test_without_a_runnable_candidate_the_error_lists_the_reasons() -> None:
    with pytest.raises(UsageError) as caught:
        selected("--transports", "nccl,mpi")
    head, *reasons = str(caught.value).splitlines()
    assert head == "no candidate can run here:"
    assert [line.split(":")[0].strip() for line in reasons] == [
        "native over nccl (torchrun)",
        "native over mpi (mpirun)",
    ]
    assert "torch sees no GPU" in reasons[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--backends", "nativ"), "backend 'nativ': expected one of native"),
        (("--backends", "single"), "backend 'single': expected one of native"),
        (("--transports", "tcp"), "transport 'tcp': expected one of shm"),
        (("--launchers", "torchrn"), "did you mean 'torchrun'"),
    ],
)
def test_unknown_names_are_refused(words: tuple[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        selected(*words)

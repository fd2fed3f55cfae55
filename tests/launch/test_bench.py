"""`dualdist bench` on two real ranks: each benchmark measures, records its setup, and refuses invalid arguments."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.base_env import ROOT
from harness.jobs import Launch
from harness.mpi import OpenMPI
from launch.running import check_refused, commands, interrupted, need_slow_link

from dualdist.bench.jobs import STATE_CALLS

BENCH = (sys.executable, "-m", "dualdist", "bench")
# The manual's lines; tests append options that make them short.
PAGES = [ROOT / "docs/pages" / name for name in ("benchmarks.md", "design/measurements.md")]
SHOWN = [words[2:] for page in PAGES for words in commands(page, "dualdist bench")]
QUICK_STEP = ("step", "--model", "mlp", "--batch", "2", "--steps", "2", "--warmup", "1", "--rounds", "2")
ROUNDS = 2


def shown(*begin: str) -> list[str]:
    """Return the words of the manual's line that begins so."""
    (words,) = (words for words in SHOWN if words[: len(begin)] == list(begin))
    return words


def record(launch: Launch, *words: str) -> dict[str, Any]:
    """Run the benchmark and return its JSON record."""
    outcome = launch([*BENCH, *words, "--json", "-"], timeout_s=240)
    kept: dict[str, Any] = json.loads(outcome.stdout)
    return kept


def check_record(kept: dict[str, Any], benchmark: str, jobs: int) -> None:
    """Check that the record holds command, machine, versions and settings."""
    assert set(kept) == set(
        ["schema", "benchmark", "command", "timestamp", "machine", "versions", "settings", "results", "jobs"]
    )
    assert (kept["schema"], kept["benchmark"]) == (4, benchmark)
    assert kept["command"].startswith(f"dualdist bench {benchmark}")
    assert kept["machine"]["cores"] >= 1
    assert kept["machine"]["processor"]
    assert {"torch", "dualdist"} <= set(kept["versions"])
    assert kept["settings"]["threads"] == 1
    assert len(kept["jobs"]) == jobs
    assert all(shlex.split(job["command"])[0] == "env" for job in kept["jobs"])


def check_ratio(found: dict[str, Any], rounds: int) -> None:
    assert found["median"]["low"] <= found["median"]["value"] <= found["median"]["high"]
    assert found["median"]["value"] > 0
    assert found["rounds"] == rounds
    assert 0 <= found["loaded_rounds"] <= rounds


def test_step_measures_every_contender_of_native_and_horovod(launch: Launch) -> None:
    # Another --model would be one more.
    line = ["mlp" if word == "resnet18" else word for word in shown("step", "--model")]
    kept = record(launch, *line, *QUICK_STEP[3:], "--no-memory", "--launches", "2", "--backend", "native,horovod")
    check_record(kept, "step", jobs=4)
    native, horovod = kept["results"]
    assert list(native["contenders"]) == ["none", "ddp", "ddp_view", "dualdist", "naive"]
    assert list(horovod["contenders"]) == ["none", "ddp", "dualdist", "hvd"]
    for result, transport in ((native, "shm"), (horovod, "gloo")):
        assert (result["ranks"], result["launches"], result["rounds"], result["steps"]) == (2, 2, ROUNDS, [2, 2])
        assert (result["transport"], result["launcher"], result["threads"]) == (transport, "torchrun", 1)
        assert isinstance(result["noise"]["is_noisy"], bool)
        for name, contender in result["contenders"].items():
            assert contender["identical_across_ranks"] is (name != "none"), name
            assert contender["max_difference"] == 0.0, name  # two ranks: bit-identical sums
            assert contender["seconds"]["value"] > 0
            assert contender["cpu_seconds"] > 0
            for found in contender["ratios"].values():
                check_ratio(found, 2 * ROUNDS)
    assert set(native["contenders"]["dualdist"]["ratios"]) == {"ddp", "ddp_view", "none"}
    assert set(horovod["contenders"]["dualdist"]["ratios"]) == {"ddp", "hvd", "none"}
    report = kept["jobs"][0]["reports"][0]
    assert len(report["foreign_cores"]) == len(report["seconds"]["ddp"]) == ROUNDS


def test_step_measures_memory_of_each_contender_alone(launch: Launch, tmp_path: Path) -> None:
    words = (*QUICK_STEP, "--model", "transformer", "--backend", "native", "--contenders", "none,ddp,dualdist")
    outcome = launch([*BENCH, *words[:1], *words[3:], "--json", str(tmp_path / "kept.json")], timeout_s=240)
    kept = json.loads((tmp_path / "kept.json").read_text())
    check_record(kept, "step", jobs=4)
    peaks = {name: contender["peak_bytes"] for name, contender in kept["results"][0]["contenders"].items()}
    held = 3 * kept["results"][0]["gradient_bytes"]  # parameters, gradients, momentum
    assert held < peaks["none"] < 3 * held  # activations too, but not what was imported
    assert peaks["ddp"] > peaks["none"]  # its buckets
    assert "DDP" in outcome.stdout  # the tables too
    assert "dualdist native / DDP" in outcome.stdout


def test_step_runs_under_mpirun_and_spawn(launch: Launch, openmpi: OpenMPI) -> None:
    for launcher, backend in (("mpirun", "horovod:mpi"), ("spawn", "native")):
        words = ("--launcher", launcher, "--backend", backend, "--contenders", "none,dualdist", "--no-memory")
        result = record(launch, *QUICK_STEP, *words)["results"][0]
        assert (result["launcher"], result["ranks"]) == (launcher, 2)
        check_ratio(result["contenders"]["dualdist"]["ratios"]["none"], ROUNDS)


def test_allreduce_measures_our_call_and_the_raw_one(launch: Launch) -> None:
    """Horovod sums no bfloat16: dualdist's calls, which can, are timed alone."""
    words = ("--sizes", "8,64K", "--rounds", str(ROUNDS), "--block-s", "0.005", "--backend", "native,horovod")
    kept = record(launch, *shown("allreduce", "--backend"), *words)
    check_record(kept, "allreduce", jobs=2)
    assert [result["library"] for result in kept["results"]] == ["torch.distributed", "horovod.torch"]
    for result in kept["results"]:
        sizes = [(size["dtype"], size["bytes"]) for size in result["sizes"]]
        assert sizes == [(dtype, nbytes) for dtype in ("float32", "bfloat16") for nbytes in (8, 65536)]
        for size in result["sizes"]:
            has_raw = size["dtype"] == "float32" or result["library"] == "torch.distributed"
            assert set(size["calls"]) - {"deepspeed_"} == ({"dualdist_", "raw_"} if has_raw else {"dualdist_"})
            for call in size["calls"].values():
                seconds = call["seconds"]["value"]
                assert call["algorithm_gb_s"] == pytest.approx(size["bytes"] / seconds / 1e9)
                assert call["bus_gb_s"] == pytest.approx(call["algorithm_gb_s"])  # 2 (n - 1) / n is 1 for two ranks
            assert set(size["ratios"]) == set(size["calls"]) - {"dualdist_"}
            for name in size["ratios"]:
                check_ratio(size["ratios"][name], ROUNDS)


def test_two_hosts_share_a_slow_link(launch: Launch, base_env: Mapping[str, str]) -> None:
    """The MLP's 1.7 MB of gradients need 0.13 s at 100 Mbit/s; between the two ranks of a host nothing is slow."""
    need_slow_link(base_env)
    words = ("--contenders", "none,ddp,dualdist", "--device", "cpu", "--slow-link", "100mbit")
    kept = record(launch, *QUICK_STEP, *words, "--rounds", "1", "-np", "4", "--backend", "native")
    check_record(kept, "step", jobs=1)
    (result,) = kept["results"]
    assert (kept["settings"]["slow_link"], result["link"]["rate"]) == ("100mbit", "100mbit")
    assert (result["ranks"], result["num_nodes"], result["transport"]) == (4, 2, "shm")
    gradient_s = result["gradient_bytes"] * 8 / 100e6
    assert result["link"]["gradient_s"] == gradient_s
    for name in ("ddp", "dualdist"):
        contender = result["contenders"][name]
        assert contender["min_seconds"] > 0.9 * gradient_s  # a burst of 128 KiB is not delayed
        assert contender["identical_across_ranks"]
        assert contender["ratios"]["link_bound"]["median"]["value"] <= contender["seconds"]["high"] / gradient_s
    assert "link_bound" not in result["contenders"]["none"]["ratios"]


def test_state_measures_time_and_memory_beside_torchs(launch: Launch) -> None:
    """DDP's constructor allocates buckets, as large as the model; dualdist broadcasts large tensors where they are."""
    words = ("--bytes", "64M", "--rounds", str(ROUNDS), "--backend", "native:shm")
    kept = record(launch, *shown("state")[:1], *words)
    check_record(kept, "state", jobs=1)
    (result,) = kept["results"]
    assert result["bytes"] == 64 << 20
    assert set(result["calls"]) == {*STATE_CALLS, *STATE_CALLS.values()}
    for name in STATE_CALLS:
        check_ratio(result["ratio_to_torch"][name], ROUNDS)
    peaks = {name: call["peak_bytes"] for name, call in result["calls"].items()}
    assert peaks["broadcast_parameters"] < result["bytes"] / 2 < peaks["DDP(model)"]


def test_startup_times_new_processes_of_every_backend(launch: Launch) -> None:
    words = ("--rounds", "1", "--backend", "native", "--ranks", "2,1")
    kept = record(launch, *shown("startup", "--ranks"), *words)
    check_record(kept, "startup", jobs=4)
    alone, together = (result["resources"]["dualdist"]["sockets"] for result in kept["results"])
    assert 0 < alone < together
    horovod = record(launch, *shown("startup", "-np")[:1], "--rounds", "1", "--backend", "horovod:mpi", "-np", "2")
    results = [*kept["results"], *horovod["results"]]
    found = [(result["launcher"], result["ranks"]) for result in results]
    assert found == [("torchrun", 1), ("torchrun", 2), ("mpirun", 2)]
    for result in results:
        parts = result["parts"]
        for held in result["resources"].values():
            assert 100 << 20 < held["private_bytes"] < held["peak_bytes"] < 1 << 30
        phases = {name: parts[name]["dualdist"]["value"] for name in ("torch", "import", "init", "first")}
        assert parts["torch"]["raw"]["value"] > 0.2
        assert 0 < phases["import"] < phases["torch"]
        assert 0 < phases["init"] < 60
        whole = parts["total to first collective"]["dualdist"]["value"]
        assert max(phases.values()) < whole <= sum(phases.values()) + 1e-9


@pytest.mark.smoke("step --model resnet18 --launches 5", "startup -np 8")
@pytest.mark.parametrize("shown", SHOWN, ids=" ".join)
def test_dry_run_prints_what_would_run_and_runs_nothing(launch: Launch, shown: list[str], tmp_path: Path) -> None:
    words = ("--dry-run", "--backend", "native", "--rounds", "3")
    outcome = launch([*BENCH, *shown, *words], env={"TMPDIR": str(tmp_path)})
    lines = outcome.stdout.splitlines()
    assert lines
    for line in lines:
        argv = shlex.split(line)
        assert argv[:3] == ["env", "OMP_NUM_THREADS=1", "DUALDIST_BACKEND=native"]
        ends = [json.loads(word)[0] for word in argv if word.startswith("[")]  # of a slow link
        assert any(word.endswith("/torchrun") for word in (*argv, *ends))
    assert outcome.stderr == ""
    assert not list(tmp_path.glob("dualdist-bench-*"))


@pytest.mark.smoke
def test_by_default_all_backends_that_can_run_are_measured(launch: Launch, openmpi: OpenMPI) -> None:
    def backends(*words: str) -> list[str]:
        lines = launch([*BENCH, *words, "--dry-run", "--device", "cpu"]).stdout.splitlines()
        found = [word for line in lines for word in shlex.split(line) if word.startswith("DUALDIST_BACKEND=")]
        return [word.partition("=")[2] for word in dict.fromkeys(found)]

    assert backends("allreduce") == backends("step") == backends("startup") == ["native", "horovod", "mpi"]
    assert backends("allreduce", "--launcher", "torchrun") == ["native", "horovod"]


@pytest.mark.smoke
def test_a_line_of_the_dry_run_runs_as_it_stands(launch: Launch, tmp_path: Path) -> None:
    words = (*QUICK_STEP, "--no-memory", "--backend", "native", "--contenders", "none")
    (line,) = launch([*BENCH, *words, "--dry-run"], env={"TMPDIR": str(tmp_path)}).stdout.splitlines()
    launch(shlex.split(line))
    (report,) = tmp_path.glob(".dualdist-bench-*/*.json")
    assert len(json.loads(report.read_text())["seconds"]["none"]) == ROUNDS


@pytest.mark.smoke("words1-'hvd' is raw Horovod", "words7-there is no folder /nowhere")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("step", "--contenders", "ddp,dpd"), "contender 'dpd': expected one of none, ddp"),
        (("step", "--contenders", "hvd", "--backend", "native"), "'hvd' is raw Horovod"),
        (("step", "--rounds", "0"), "--rounds 0: expected 1 or more"),
        (("step", "--image-size", "8"), "--image-size 8: expected 32 or more"),
        (("step", "--backend", "nccl"), "backend 'nccl': expected one of native"),
        (("step", "-np", "0"), "--ranks 0"),
        (("step", "--env", "A"), "--env A: expected NAME=VALUE"),
        (("step", "--json", "/nowhere/x.json"), "there is no folder /nowhere"),
        (("step", "--slow-link", "fast"), "--slow-link fast: expected a rate, as 100mbit"),
        (("allreduce", "--slow-link", "1gbit", "-np", "1"), "--ranks 1: expected 2 or more"),
        (("step", "--slow-link", "1gbit", "--backend", "mpi", "--dry-run"), "mpi needs a launcher that starts MPI"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(launch: Launch, words: tuple[str, ...], expected: str) -> None:
    check_refused(launch, [*BENCH, *words], expected)


def test_results_are_reported_with_failures(launch: Launch, tmp_path: Path) -> None:
    words = ("--sizes", "8,64K", "--rounds", "2", "--launches", "2", "--block-s", "0.005", "--device", "cpu")
    file = tmp_path / "kept.json"
    words = (*words, "--backend", "native:nccl,native:gloo", "--json", str(file))
    outcome = launch([*BENCH, "allreduce", *words], check=False)
    assert outcome.rc == 1
    kept = json.loads(file.read_text())
    (result,) = kept["results"]
    assert (result["transport"], result["launches"]) == ("gloo", 2)
    assert ["error" in job for job in kept["jobs"]] == [False, False, True, True]
    assert "latency and bandwidth" in outcome.stdout or "64 KiB" in outcome.stdout
    assert "allreduce on 2 ranks, native over nccl (torchrun) failed (exit code 1): env " in outcome.stderr
    assert "DUALDIST_TRANSPORT=nccl" in outcome.stderr
    assert "it failed before, and was not launched again" in outcome.stdout
    assert "Traceback" not in outcome.stderr


def test_ctrl_c_reports_the_results_until_then(launch: Launch) -> None:
    words = ("--sizes", "8,64K", "--rounds", "2", "--block-s", "0.005", "--backend", "native:gloo,native:shm")
    outcome = interrupted(launch, [*BENCH, "allreduce", *words], "[2/2]")
    assert outcome.rc == 130, str(outcome)
    assert outcome.left == ()
    assert "64 KiB" in outcome.stdout
    assert "interrupted" in outcome.stdout
    assert "Traceback" not in outcome.stderr

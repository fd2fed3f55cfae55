"""A benchmark's interleaving, jobs, reports and models, and the recording of a training."""

import argparse
import atexit
import itertools
import json
import math
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdist as dd
from dualdist.backends.registry import Availability
from dualdist.bench import startup, step
from dualdist.bench.jobs import (
    FOREIGN,
    METHODS,
    AllreduceOptions,
    MachineFacts,
    MeasurementSettings,
    PlannedJob,
    RunConfig,
    StepOptions,
    TrainOptions,
    parse_configs,
    program_command,
    refusal_reasons,
    run_job,
    worker_command,
)
from dualdist.bench.ranks.measurements import (
    RankTimings,
    interleave,
    merge_ranks,
    repeats_to_fill,
    round_order,
    train,
)
from dualdist.bench.ranks.training import step_case
from dualdist.bench.recording import Recorder, tcp_bytes_sent
from dualdist.bench.report import (
    dump_json,
    format_command,
    format_size,
    make_record,
)
from dualdist.bench.slow_link import link_bytes_s, require_slow_link
from dualdist.bench.startup import with_raw_launchers
from dualdist.bench.step import choose_methods
from dualdist.cli.bench import _counts, _size
from dualdist.errors import LaunchError, UsageError
from dualdist.launch.job import Command, Site
from dualdist.utils.machine import CpuUse

SITE = Site("/v/python", {"torchrun": "/v/torchrun", "mpirun": "/v/mpirun"}, "/v", "openmpi4")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_contender_is_first_and_last_equally_often(count: int) -> None:
    names = list("abcde"[:count])
    orders = [round_order(names, number) for number in range(2 * count)]
    assert all(sorted(order) == names for order in orders)
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 2)
    assert Counter(order[-1] for order in orders) == dict.fromkeys(names, 2)
    pairs = {pair for order in orders for pair in itertools.pairwise(order)}
    assert all(sum(first == name for first, _ in pairs) >= min(2, count - 1) for name in names), "neighbours change"


def test_every_contender_is_timed_in_every_round_and_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    turns = {name: lambda name=name: calls.append(name) for name in "ab"}
    barriers: list[int] = []
    monkeypatch.setattr(dd, "barrier", lambda: barriers.append(len(calls)))
    timings = interleave(turns, 3, 2, torch.device("cpu"), warmup=2)
    assert calls == [*"aaaaa", *"bbbbb", *"bbbbb", *"aaaaa"]
    assert barriers == [2, 7, 12, 17]  # after each warm-up
    assert {name: len(rounds) for name, rounds in timings.seconds.items()} == {"a": 2, "b": 2}
    assert len(timings.rounds) == 2

    def timings(machine: str, seconds: float, cpu_s: float) -> RankTimings:
        return RankTimings(machine, {"a": [seconds]}, {"a": [cpu_s]}, [CpuUse(1.0, 2.0, cpu_s)])

    found = merge_ranks([timings("a", 1.0, 0.25), timings("a", 3.0, 0.5), timings("b", 2.0, 0.125)])
    assert found == {"seconds": {"a": [3.0]}, "cpu_s": {"a": [0.875]}, "foreign_cores": [1.875]}


@pytest.mark.parametrize(("seconds", "repeats"), [(0.1, 4), (10.0, 3), (1e-6, 50), (0.0, 50)])
def test_repeats_fill_a_block_within_bounds(seconds: float, repeats: int) -> None:
    assert repeats_to_fill(0.4, seconds, 3, 50) == repeats


def test_backends_are_given_with_or_without_their_transport() -> None:
    assert parse_configs("native,horovod:mpi", None) == [
        RunConfig("native", None, "torchrun"),
        RunConfig("horovod", "mpi", "mpirun"),
    ]
    assert parse_configs("native:gloo", "mpirun") == [RunConfig("native", "gloo", "mpirun")]


@pytest.mark.parametrize(
    ("backends", "launcher", "expected"),
    [
        ("nativ", None, "backend 'nativ': expected one of native, horovod, mpi, or several"),
        ("auto", None, "backend 'auto'"),
        ("native:tcp", None, "transport 'tcp': expected one of"),
        ("native,native", None, "name each once"),
        ("native", "mpirunn", "launcher 'mpirunn': expected one of"),
    ],
)
def test_invalid_backends_transports_and_launchers_are_refused(backends: str, launcher: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parse_configs(backends, launcher)


def test_the_worker_command_has_launcher_and_variables_of_its_configuration() -> None:
    options, report = StepOptions("mlp", ("none",)), Path("/r.json")
    settings = MeasurementSettings(2, SITE, device="cpu", timeout_s=60, env={"A": "b"})
    built = worker_command(RunConfig("horovod", "gloo", "torchrun"), "step", options, report, settings)
    assert built.env == {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "A": "b",
        "DUALDIST_BACKEND": "horovod",
        "DUALDIST_TRANSPORT": "gloo",
    }
    assert built.argv[-5:-1] == ("-m", "dualdist.bench.ranks.worker", "step", "/r.json")
    found = StepOptions(**json.loads(built.argv[-1]))
    assert (found.model, found.device, found.timeout_s) == ("mlp", "cpu", 60)
    site = replace(SITE, tools={"srun": "/v/srun"})
    built = program_command(RunConfig("native", None, "srun"), ("x.py",), MeasurementSettings(2, site, threads=4))
    assert "--cpus-per-task=4" in built.argv
    assert built.env["OMP_NUM_THREADS"] == "4"
    config = RunConfig("native", None, "spawn")
    built = worker_command(config, "allreduce", AllreduceOptions((8,)), report, MeasurementSettings(3, SITE))
    assert built.argv[:4] == ("/v/python", "-m", "dualdist.bench.ranks.worker", "--spawn=3")


@pytest.mark.parametrize("prefix", ["", "[1,1]<stderr>:"])
def test_a_job_that_failed_is_told_by_its_exception_however_much_its_launcher_says_after_it(prefix: str) -> None:
    program = f"print('{prefix}ValueError: boom'); [print('after', n) for n in range(99)]; raise SystemExit(3)"
    failing = PlannedJob("x", Command((sys.executable, "-c", program), prefix=r"\[\d+,\d+\]<\w+>:"), ())
    with pytest.raises(LaunchError) as caught:
        run_job(failing, 60)
    head, exception, *shown = str(caught.value).splitlines()
    assert head.startswith("x failed (exit code 3): ")
    assert (exception, shown[-1], len(shown)) == ("ValueError: boom", "after 98", 31)


def test_a_secret_of_a_job_is_neither_in_its_command_line_nor_in_what_is_told_of_its_failure() -> None:
    program = "import os, sys; sys.exit('no ' + os.environ['A_TOKEN'])"
    failing = PlannedJob(
        "x", Command((sys.executable, "-c", program, "--env=B_TOKEN=hush-2"), {"A_TOKEN": "hush-1"}), ()
    )
    assert failing.command_line.startswith("env 'A_TOKEN=***' ")
    assert failing.command_line.endswith(" '--env=B_TOKEN=***'")
    with pytest.raises(LaunchError, match=r"no \*\*\*$") as caught:
        run_job(failing, 60)
    assert "hush" not in str(caught.value)
    assert format_command(["bench", "step", "--env=B_TOKEN=hush-2", "--env", "A_TOKEN=hush-1"]) == (
        "dualdist bench step '--env=B_TOKEN=***' --env 'A_TOKEN=***'"
    )
    slow = PlannedJob("x", Command(("sh", "-c", "echo $A_TOKEN; sleep 60"), failing.command.env), ())
    with pytest.raises(LaunchError, match=r"was not done after") as caught:
        run_job(slow, 0.5)
    assert "hush" not in str(caught.value)


def test_the_record_has_the_versions_of_gpus_and_null_for_nan() -> None:
    on_cpu, on_gpu = {"device_versions": {}}, {"device_versions": {"CUDA": "13.0", "NCCL": "2.28.3"}}
    for jobs in ([{"ranks": [on_cpu]}, {"ranks": [on_gpu]}], [{"reports": [{}]}, {"reports": [on_gpu]}]):
        assert make_record("x", "c", {}, jobs, None)["versions"].items() >= {"CUDA": "13.0", "NCCL": "2.28.3"}.items()
    assert "CUDA" not in make_record("x", "c", {}, [{"ranks": [on_cpu]}, {"reports": []}], None)["versions"]
    data = {"a": [math.nan, 1.5, (math.inf, "NaN")], "b": {"c": -math.inf, "d": None, "e": True}}
    assert dump_json(data) == '{"a": [null, 1.5, [null, "NaN"]], "b": {"c": null, "d": null, "e": true}}'


def test_methods_suit_the_backend_and_raw_libraries_have_their_launcher() -> None:
    horovod, native = (RunConfig(name, None, "torchrun") for name in ("horovod", "native"))
    assert choose_methods(["hvd"], horovod) == ("hvd",)
    assert "hvd" in choose_methods((), horovod)
    assert "hvd" not in choose_methods((), native)
    with pytest.raises(UsageError, match="expected each of them once"):
        choose_methods(["ddp", "ddp"], native)
    found = with_raw_launchers(parse_configs("native,horovod,horovod:mpi", None))
    assert [config.launcher for config in found] == ["torchrun", "horovodrun", "mpirun"]


def started(kind: str, number: int) -> tuple[PlannedJob, list[dict[str, Any]]]:
    tags = {"config": RunConfig("native", None, "torchrun"), "kind": kind, "ranks": 1, "launch": number}
    held: dict[str, Any] = dict.fromkeys(startup.RESOURCES, 1)
    report = {"seconds": dict.fromkeys(startup.PHASES, 1.0 + number), **held, FOREIGN: 0.0}
    return PlannedJob("x", Command(("x",)), (), tags), [report]


def test_summaries_use_rounds_that_both_libraries_completed() -> None:
    whole = [started("raw", 0), started("dualdist", 0)]
    (found,) = startup.summarize([*whole, started("raw", 1)])
    assert (found["rounds"], found["parts"]["init"]["raw"]["value"]) == (1, 1.0)
    assert list(startup.tables([found]))
    assert startup.summarize([started("dualdist", 0)]) == []


@pytest.mark.parametrize(
    ("name", "tensors", "millions"), [("mlp", 200, 0.42), ("transformer", 63, 9.6), ("resnet18", 62, 11.7)]
)
def test_a_case_builds_equal_models_of_the_stated_size_and_a_different_batch_per_rank(
    name: str, tensors: int, millions: float
) -> None:
    options = StepOptions(name, tuple(METHODS), batch=2, image_size=32)
    case, others = (step_case(options, torch.device("cpu"), rank) for rank in (0, 1))
    torch.manual_seed(77)
    before = torch.random.get_rng_state()
    first, second = case.build(), case.build()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    sizes = [
        parameter.numel() for parameter in step_case(StepOptions(name, ()), case.inputs.device, 0).build().parameters()
    ]
    assert (len(sizes), sum(sizes) / 1e6) == (tensors, pytest.approx(millions, rel=0.02))
    assert not torch.equal(case.inputs, others.inputs)
    case.loss(first).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in first.parameters())


@pytest.mark.parametrize(("nbytes", "words"), [(8, "8 B"), (65536, "64 KiB"), (25 << 20, "25 MiB"), (1 << 30, "1 GiB")])
def test_sizes_and_ranks_are_formatted_and_parsed(nbytes: int, words: str) -> None:
    assert format_size(nbytes) == words
    assert _size(words.replace(" B", "").replace(" ", "").replace("iB", "")) == nbytes
    for text in ("", "x", "3", "1.5M", "-8", "M"):
        with pytest.raises(argparse.ArgumentTypeError, match="as 8, 64K or 25M"):
            _size(text)
    assert _counts("8,2,4,2") == (2, 4, 8)
    with pytest.raises(UsageError, match="as 2,4,8"):
        _counts("2,four")


@pytest.fixture
def _session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dd.init()
    yield
    dd.shutdown()


@pytest.mark.usefixtures("_session")
def test_a_training_whose_allreduces_cannot_be_timed_is_recorded_with_the_reason(
    tmp_path: Path,
) -> None:
    options = TrainOptions("mlp", "dualdist", batch=2, warmup=1, steps=2, sizes=(8,))
    reason = "no raw library is known beneath the backend 'single', to compare it with"
    assert train(options, tmp_path, 0.0) == {"unmeasured": reason}
    assert len(json.loads((tmp_path / "rank-0.json").read_text())["ends"]) == 3


STEPS = 5


class Derived(torch.optim.SGD):
    """torch calls step hooks for this class and for SGD."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # restored afterwards
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    return Recorder(tmp_path / "rank-0.json", 1, STEPS - 1, {}, torch.device("cpu"), 0.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Derived])
def test_a_step_counts_once_even_if_it_calls_the_base_classs_step(
    recorder: Recorder, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    torch.optim.SGD([torch.zeros(1)])
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer, taken = kind([parameter], lr=0.5), itertools.count(1)
    recorder.attach(optimizer, "unordered", lambda _: 0)
    with torch.no_grad():
        parameter.add_(1.0)  # as a broadcast does after the optimizer was wrapped

    def train() -> None:
        while True:
            optimizer.zero_grad()
            (next(taken) * parameter.sum()).backward()
            optimizer.step()

    with pytest.raises(SystemExit):
        train()
    kept = json.loads(recorder.path.read_text())
    assert (next(taken), len(kept["ends"])) == (STEPS + 1, STEPS)
    assert kept["losses"] == [2.0, 2.0, -3.0, -16.0, -40.0]
    assert kept["reduction"] == "unordered"
    assert (kept["start"], kept["sample"]) == ([1.0, 1.0], [-6.5, -6.5])
    assert kept["rounding"] == pytest.approx(1.2e-7, rel=0.01)


def test_a_slow_link_has_a_torchrun_at_each_end() -> None:
    settings = MeasurementSettings(3, SITE, slow_link="100mbit")
    built = program_command(RunConfig("native", "gloo", "torchrun"), ("x.py",), settings)
    assert built.argv[1:4] == ("-m", "dualdist.bench.slow_link", "100mbit")
    first, second = (json.loads(word) for word in built.argv[4:])
    assert [word for word in first if word not in second] == ["--node-rank=0", "--nproc-per-node=2"]
    assert [word for word in second if word not in first] == ["--node-rank=1", "--nproc-per-node=1"]
    assert built.env["DUALDIST_TRANSPORT"] == "gloo"
    alone = program_command(RunConfig("auto", None, "python"), ("x.py",), replace(settings, ranks=1))
    assert "dualdist.bench.slow_link" not in alone.argv


def test_a_slow_link_needs_torchrun_and_shared_memory_two_ranks_on_a_host() -> None:
    backends = dict.fromkeys(("native", "horovod"), Availability(True, None, ""))
    facts = MachineFacts(0, backends, is_in_slurm=False)
    shm, mpirun = RunConfig("native", "shm", "torchrun"), RunConfig("native", None, "mpirun")
    for ranks, refused in ((2, {shm, mpirun}), (3, {mpirun})):
        configs = [shm, mpirun, *parse_configs("native,native:gloo", None)]
        found = refusal_reasons(configs, MeasurementSettings(ranks, SITE, slow_link="1gbit"), facts)
        assert found.keys() == refused
        assert all("shm needs two ranks on one" in reason for reason in found.values())


def test_a_step_over_a_slow_link_is_compared_with_what_the_link_allows() -> None:
    report = {
        **dict.fromkeys(("backend", "transport", "launcher", "device", "threads", "parameters", "tensors", "steps"), 1),
        **{"ranks": 4, "num_nodes": 2, "gradient_bytes": 1250000, "difference_from": None, "max_difference": {}},
        "options": {"batch": 1, "rounds": 2, "image_size": 32},
        "seconds": {"none": [0.05, 0.2], "dualdist": [0.12, 0.3]},  # and 0.1 on the link
        "cpu_s": {"none": [0.1], "dualdist": [0.1]},
        "foreign_cores": [0.0, 0.0],
        "sent_bytes": {"none": 0, "dualdist": 1250000},
        "identical_across_ranks": {"none": False, "dualdist": True},
    }
    config = RunConfig("native", None, "torchrun")
    tags = {"kind": "step", "model": "mlp", "config": config}
    done = [(PlannedJob("step", Command(("x",)), (), tags), [report])]
    (result,) = step.summarize(done, "100mbit")
    assert result["link"] == {"rate": "100mbit", "gradient_s": 0.1}
    ratios = result["contenders"]["dualdist"]["ratios"]
    assert ratios["link_bound"]["median"]["value"] == pytest.approx((0.12 / 0.1 + 0.3 / 0.2) / 2)
    times, over = step.tables([result])
    assert "4 ranks on 2 hosts" in times.title
    assert "100.00 ms, which 1.19 MiB of gradients take at 100mbit" in over.notes[0]
    (result,) = step.summarize(done)
    assert result["link"] is None
    assert result["contenders"]["dualdist"]["ratios"].keys() == {"none"}


@pytest.mark.parametrize(("rate", "bytes_s"), [("512kbit", 64e3), ("1.5mbit", 187.5e3), ("10gbit", 1.25e9)])
def test_a_rate_is_of_bits(rate: str, bytes_s: float) -> None:
    assert link_bytes_s(rate) == bytes_s


@pytest.mark.parametrize(
    ("rate", "is_root", "words"),
    [("fast", True, "as 100mbit"), ("0mbit", True, "as 100mbit"), ("1gbit", False, "root")],
)
def test_a_slow_link_that_cannot_be_made_is_refused(rate: str, is_root: bool, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        require_slow_link(rate, replace(SITE, is_root=is_root))


def test_compressions_are_contenders() -> None:
    config = RunConfig("native", None, "torchrun")
    names = ("ddp", "bf16", "powersgd:2", "topk:0.05")
    assert choose_methods(names, config) == names
    for wrong in ("powersgd", "powersgd:0", "topk:2", "fp8"):
        with pytest.raises(UsageError, match="powersgd:RANK"):
            choose_methods((wrong,), config)


def test_bytes_that_have_not_arrived_yet_are_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        sender.setblocking(False)
        before = tcp_bytes_sent()
        given = sender.send(bytes(1 << 24))  # more than the receiver's buffer, from which nobody reads
        assert given > 1 << 16
        assert tcp_bytes_sent() - before in (given, given + 1)  # TCP counts the connection's begin as a byte

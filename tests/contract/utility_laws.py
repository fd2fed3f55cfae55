"""Metrics, printing, dd.info() and the timeline."""

import contextlib
import ctypes
import faulthandler
import io
import math
import os
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contract.oracle import law, law_alone, loss_of, net, raises, ranks
from harness import trace_format
from torch import nn

import dualdist as dd
from dualdist import session
from dualdist.errors import MismatchError, NotInitializedError, UsageError
from dualdist.trace import timeline

STEPS = 3


@law
def a_metric_is_the_mean_over_all_ranks_samples() -> None:
    metric = dd.Metric("loss")
    assert math.isnan(metric.value())
    assert math.isnan(metric.local)
    metric.update(float(dd.rank()), count=dd.rank() + 1)
    metric.update(torch.tensor([10.0], requires_grad=True), count=0 if dd.rank() else 2)
    total = sum(rank * (rank + 1) for rank in ranks()) + 20.0
    count = sum(rank + 1 for rank in ranks()) + 2
    assert metric.value() == metric.value() == total / count
    expected = 20 / 3 if dd.rank() == 0 else float(dd.rank())
    assert metric.local == expected
    metric.reset()
    if dd.rank() == dd.size() - 1:  # the others have seen nothing
        metric.update(3)
    assert metric.value() == 3.0
    raises(UsageError, lambda: metric.update(torch.ones(2)), "one number")
    raises(UsageError, lambda: metric.update(1.0, count=-1), "count=-1")
    raises(UsageError, lambda: metric.update(1.0, count=math.nan), "count=nan")
    raises(UsageError, lambda: metric.update("3"), "a value of str")  # type: ignore[arg-type]
    if dd.rank() == 0:
        metric.update(math.nan)
    assert math.isnan(metric.value()), "one rank's NaN is seen on all"


@law
def a_metric_sums_in_more_than_float32() -> None:
    metric = dd.Metric()
    for _ in range(10):
        metric.update(torch.tensor(float(2**24) + 2), count=2**24)
        metric.update(np.float32(1.0))  # type: ignore[arg-type]
    exact = 10 * (2**24 + 2) * 2**24 + 10
    assert metric.value() == exact / (10 * 2**24 + 10)


@law
def print_and_info_show_the_rank() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        dd.print("a", 1, sep="-")
        dd.print("last", rank=dd.size() - 1, end="!")
        dd.print("x\ny", rank=None)
    first = "a-1\n" if dd.rank() == 0 else ""
    last = "last!" if dd.rank() == dd.size() - 1 else ""
    assert printed.getvalue() == f"{first}{last}[{dd.rank()}] x\n[{dd.rank()}] y\n"
    raises(UsageError, lambda: dd.print("x", rank=dd.size()), f"0 to {dd.size() - 1}")
    info = dd.info()
    assert "\n" not in info
    assert f"rank {dd.rank()} of {dd.size()}" in info
    assert f"{dd.backend()} over {dd.transport()}, started by {dd.launcher()}" in info


@law_alone
def the_timeline_shows_compute_and_communication_of_all_ranks() -> None:
    """One file, written by rank 0, with comparable clocks and every step on every rank."""
    backend = dd.backend() if dd.backend() != "single" else "auto"
    transport = dd.transport()
    folder = Path(dd.broadcast_object(tempfile.mkdtemp() if dd.rank() == 0 else ""))
    rank, size = dd.rank(), dd.size()
    # A rank that replaced another has had fewer sessions than the others.
    timeline.start_timeline(str(folder / "late.json"), session.current().world, rank, "").finish()
    if rank == 0:
        (folder / ("late.json" if size == 1 else f"late-{size}.json")).unlink()
    dd.shutdown()
    os.environ["DUALDIST_TIMELINE"] = str(folder / "trace.json")
    try:
        dd.init(backend, timeout_s=40)
        assert dd.transport() == transport
        train()
        dd.shutdown()
        (path,) = folder.iterdir() if rank == 0 else [folder / "trace.json"]
        check(trace_format.load(path) if rank == 0 else [], size)
        os.environ["DUALDIST_TIMELINE"] = str(folder / "no" / "trace.json")
        raises(UsageError, lambda: dd.init(backend, timeout_s=40), "there is no folder")
        assert not dd.is_initialized()
        os.environ["DUALDIST_TIMELINE"] = str(folder / "trace.json")
        dd.init(backend, timeout_s=40)
        dd.barrier()
        dd.shutdown()
        if rank == 0:
            assert len(list(folder.iterdir())) == 2, "a later session writes another file"
            for each in folder.iterdir():
                each.unlink()
            folder.rmdir()
    finally:
        del os.environ["DUALDIST_TIMELINE"]


def train() -> None:
    """Train three steps, with collectives of all ranks and of a group."""
    model = net()
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    some = dd.new_group([0])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, dd.rank(), step).backward()
        optimizer.step()
        dd.allreduce(torch.ones(4), name=f"metric {step}")
        if some.is_member:
            dd.allreduce(torch.ones(1), name=f"own {step}", group=some)
    with torch.no_grad():
        nn.Linear(1, 1)(torch.ones(1))


def check(events: list[dict[str, Any]], size: int) -> None:
    """Check what must be in the trace, whatever dualdist calls its tracks."""
    spans: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"]][event["name"].partition(" gradients.")[0]].append(event)
    if not events:
        return
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(titles) == sorted(spans) == list(range(size))
    for rank, own in spans.items():
        assert titles[rank].startswith(f"rank {rank} (")
        assert len(own["backward"]) == len(own["step SGD"]) == STEPS, own.keys()
        steps = sorted(name for name in own if name.startswith("step "))
        assert steps == [*(f"step {number}" for number in range(STEPS)), "step SGD"]
        # Only the model's outermost module; the last forward is that of a Linear alone.
        assert len(own["forward Sequential"]) >= STEPS
        assert len(own["forward Linear"]) == 1
        for number in range(STEPS):
            (whole,), backward, step = own[f"step {number}"], own["backward"][number], own["step SGD"][number]
            assert whole["ts"] <= backward["ts"] <= ended(backward) <= step["ts"] + 0.002
            assert ended(step) <= ended(whole) + 0.002
            (metric,) = own[f"allreduce metric {number}"]
            assert ended(step) <= metric["ts"] + 0.002
            if size > 1:
                inside = [e for e in own["allreduce"] if backward["ts"] <= e["ts"] and ended(e) <= step["ts"] + 0.002]
                assert inside, "gradients travel while backward runs"
                assert all(e["args"]["bytes"] > 0 for e in inside)
        assert ("allreduce own 0" in own) == (rank == 0)
    for number in range(STEPS):
        # No rank leaves an allreduce before the last one has entered it.
        of_all = [own[f"allreduce metric {number}"][0] for own in spans.values()]
        assert max(e["ts"] for e in of_all) <= min(map(ended, of_all)) + 1.0


def ended(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


@law
def samplers_that_differ_are_an_error_at_the_first_iteration_of_an_epoch_on_every_rank() -> None:
    last = dd.rank() == dd.size() - 1
    data = range(8 * dd.size())
    half = torch.utils.data.Subset(data, list(data[dd.rank() :: dd.size()]))  # type: ignore[arg-type]

    def begin(dataset: Any = data, batch: int = 2, epoch: int = 0, done: int = 0, **options: Any) -> None:
        sampler = dd.Sampler(dataset, **{"remainder": "drop", **options})
        sampler.set_epoch(epoch)
        if done:
            sampler.load_state_dict(sampler.state_dict() | {"position": done})
        next(iter(dd.loader(dataset, batch, sampler=sampler)))

    different: list[tuple[dict[str, Any], str]] = [
        ({"seed": dd.rank()}, "seed is 0 on rank 0, 1 on rank 1"),
        ({"dataset": range(40 + last)}, "samples is 40 on rank"),
        ({"dataset": half}, "subset is of indices 0, "),
        ({"shuffle": last}, "shuffle is False on rank"),
        ({"weights": [1.0] * 7 + [1.0 + last], "dataset": range(8)}, "weights is SHA-256 "),
        ({"remainder": "pad" if last else "drop"}, "remainder is drop on rank"),
        ({"epoch": int(last)}, "epoch is 0 on rank"),
        ({"done": dd.size() * (1 + last)}, f"position is {dd.size()} on rank"),
        ({"batch": 2 + last}, "batch_size is 2 on rank"),
    ]
    for arguments, words in different if dd.size() > 1 else ():
        raises(MismatchError, lambda given=arguments: begin(**given), "dd.Sampler differs", words)  # type: ignore[misc]
    begin()


@law
def samplers_are_compared_once_an_epoch_whatever_batch_each_rank_left_it_at() -> None:
    exchanges = session.current().world.exchanges
    sampler = dd.Sampler(range(4 * dd.size()), remainder="drop")
    loader = dd.loader(range(4 * dd.size()), 1, sampler=sampler)  # type: ignore[arg-type]
    for batches in (1, 1 + dd.rank() % 2, 4):  # then the rest
        for _ in zip(range(batches), loader, strict=False):
            pass
    assert session.current().world.exchanges - exchanges == (dd.size() > 1)
    list(loader)
    assert session.current().world.exchanges - exchanges == 2 * (dd.size() > 1)


@law
def uneven_samplers_go_on_to_the_next_epoch_at_their_own_step() -> None:
    """As a program that counts steps, not epochs; it is the other ranks' allreduce that they meet there."""
    sampler = dd.Sampler(range(2 * dd.size() + 1), remainder="uneven")
    loader = dd.loader(range(2 * dd.size() + 1), 1, sampler=sampler)  # type: ignore[arg-type]
    batches = iter(loader)
    for _ in range(7):
        try:
            next(batches)
        except StopIteration:
            batches = iter(loader)
            next(batches)
        assert dd.allreduce(torch.ones(1), op="sum").item() == dd.size()


def status_of_child(call: Callable[[], object]) -> int:
    """Return the exit status of a forked child that runs the call: 3 if it returns, and ends as a program does."""
    faulthandler.cancel_dump_traceback_later()  # of the harness: a forked child waits for its thread at exit
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        call()
        ctypes.pythonapi.Py_Exit(3)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


@law
def a_forked_child_has_no_session_and_its_exit_leaves_the_rank_alone() -> None:
    model = net(seed=1)
    optimizer = dd.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    group = dd.new_group(ranks())
    under_way = dd.allreduce(torch.full((2,), float(dd.rank())), op="sum", async_op=True)
    rank = dd.rank()

    def use_and_shut_down() -> None:
        words = f"a child that rank {rank} forked after dd.init()"
        raises(NotInitializedError, lambda: dd.allreduce(torch.full((2,), 100.0)), words)
        raises(NotInitializedError, lambda: dd.allreduce(torch.full((2,), 100.0), group=group), words)
        for call in (dd.rank, dd.barrier, dd.init):
            raises(NotInitializedError, call, words)
        raises(NotInitializedError, lambda: (loss_of(model, 0).backward(), optimizer.step()))
        assert not dd.is_initialized()
        assert list(dd.progress([1])) == [1]
        dd.shutdown()

    assert status_of_child(use_and_shut_down) == 3
    expected = [float(sum(ranks()))] * 2
    assert under_way.wait().tolist() == expected
    assert dd.allreduce(torch.full((2,), float(rank)), op="sum", group=group).tolist() == expected
    loss_of(model, 0).backward()
    optimizer.step()
    dd.check_consistency(model)
    dd.remove_group(group)

"""Inside the ranks: one contender trains alone in its job, and every step, its loss and the result are recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import dualdist as dd
from dualdist import session
from dualdist.bench.cases import WITH_TORCH, AllreduceOptions, TrainOptions
from dualdist.bench.ranks import allreduce_rounds, baselines
from dualdist.bench.ranks.models import ModelFactory, case_of
from dualdist.bench.ranks.steps import Contender, contender
from dualdist.diagnostics.recording import Recorder, RecordingPlan, describe_run
from dualdist.errors import UnsupportedError

BATCHES = 8  # that come round again and again, in the same order for everybody
ALLREDUCE_ROUNDS, ALLREDUCE_BLOCK_S = 3, 0.002  # of each launch, and there are several


def train(options: TrainOptions, folder: Path, began: float) -> dict[str, Any] | None:
    """Train on an open session; every rank leaves its record in the folder, and gets what allreduces took, or why
    they cannot be timed here.
    """
    device = dd.device()
    place = describe_run(session.current().topology, dd.backend(), dd.transport(), device)
    plan = RecordingPlan(folder / f"rank-{dd.rank()}.json", options.warmup, options.steps)
    recorder = Recorder(plan, {"rank": dd.rank(), **place}, device, began)
    end: Callable[[], None] = _nothing
    if options.contender in WITH_TORCH:
        end = baselines.start_torch(
            dd.rank(), dd.size(), dd.num_nodes(), dd.broadcast_object, device, options.timeout_s
        )
    try:
        cases = batches(options, device)
        each = contender(options.contender, cases[0], device)
        recorder.start(each.model.parameters())
        _train(each, cases, recorder, options.slow)
        recorder.write(each.model.parameters())
    finally:
        end()
    if not options.sizes:
        return None
    sweep = AllreduceOptions(options.sizes, ALLREDUCE_ROUNDS, ALLREDUCE_BLOCK_S, options.device, options.timeout_s)
    try:
        return allreduce_rounds.measure(sweep)
    except UnsupportedError as error:  # on every rank alike; the training has been recorded
        return {"unmeasured": str(error)}


def batches(options: TrainOptions, device: torch.device) -> list[ModelFactory]:
    """This rank's part of every batch; all ranks together have the same samples in the same order everywhere."""
    wholes = (
        case_of(replace(options.as_step, seed=options.seed + 1000 * number), torch.device("cpu"), 0)
        for number in range(BATCHES)
    )
    parts = [whole.part(dd.rank(), dd.size()) for whole in wholes]
    build = case_of(replace(options.as_step, batch=1), device, 0).build
    return [ModelFactory(build, part.inputs.to(device), part.targets.to(device)) for part in parts]


def _train(each: Contender, cases: list[ModelFactory], recorder: Recorder, slow: float) -> None:
    number = 0
    while not recorder.is_complete:
        began = time.perf_counter()
        loss = each.step(cases[number % BATCHES])
        if slow > 1:
            _spin_until(began + slow * (time.perf_counter() - began))
        recorder.step(loss)
        number += 1


def _spin_until(moment: float) -> None:
    while time.perf_counter() < moment:
        pass


def _nothing() -> None: ...

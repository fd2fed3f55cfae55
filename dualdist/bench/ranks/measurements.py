"""Measurements in the ranks: interleaved steps and allreduces, peak memory, and the training of one contender.

Contenders take turns round by round in one process (A B C, C B A, ...), so that noise affects all of them alike.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dualdist as dd
from dualdist import session
from dualdist.backends import registry
from dualdist.bench.jobs import TORCH_METHODS, AllreduceOptions, StepOptions, TrainOptions
from dualdist.bench.ranks import training
from dualdist.bench.ranks.cold_start import RAW_LIBRARIES, Library
from dualdist.bench.ranks.deepspeed import load_allreduces
from dualdist.bench.ranks.training import (
    Trainer,
    TrainingCase,
    is_by_dualdist,
    make_case,
    make_trainer,
    step_case,
    torch_group,
    whole_parameters,
)
from dualdist.bench.recording import recorder_of
from dualdist.bench.statistics import max_foreign_cores
from dualdist.collectives.consistency import digest
from dualdist.errors import CollectiveError, UnsupportedError
from dualdist.topology import Topology
from dualdist.utils import accelerator
from dualdist.utils.machine import CpuUse, read_cpu, reset_peak, resident_kib
from dualdist.utils.network_interfaces import boot_id

MIN_STEPS, MAX_STEPS = 3, 50
# DDP rebuilds its buckets after the first step, and allocators reach their peak in the second.
MEMORY_STEPS = 5
MAX_REPEATS = 1000
WARMUP_CALLS = 2
BATCHES = 8  # distinct batches of a training, used in turn
ALLREDUCE_ROUNDS, ALLREDUCE_BLOCK_S = 3, 0.002  # how allreduces are timed in each launch of a comparison


Calls = Mapping[str, Callable[[], object]]  # by the name of a contender


@dataclass(frozen=True)
class RankTimings:
    """Samples of one rank: seconds and CPU seconds per call, by contender and round, and CPU use of each round.

    Ranks of equal `boot_id` share processors, though each may have a host, a network namespace, of its own.
    """

    boot_id: str
    seconds: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    rounds: list[CpuUse] = field(default_factory=list)


def round_order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: each contender is first equally often, and odd rounds run in reverse."""
    shift = number // 2 % len(names)
    rotated = [*names[shift:], *names[:shift]]
    return rotated[::-1] if number % 2 else rotated


def interleave(calls: Calls, repeats: int, rounds: int, device: torch.device, warmup: int = 1) -> RankTimings:
    """Time every call in every round, `repeats` calls per sample; called by all ranks."""
    timings = RankTimings(boot_id(), {name: [] for name in calls}, {name: [] for name in calls})
    for number in range(rounds):
        before = read_cpu()
        for name in round_order(list(calls), number):
            seconds, cpu_s = time_call(calls[name], repeats, device, warmup)
            timings.seconds[name].append(seconds)
            timings.cpu_s[name].append(cpu_s)
        timings.rounds.append(read_cpu().since(before))
    return timings


def time_call(call: Callable[[], object], repeats: int, device: torch.device, warmup: int = 1) -> tuple[float, float]:
    """Return seconds and CPU seconds of this process per call, over `repeats` calls.

    Before them `warmup` calls refill caches and wake connections.
    """
    for _ in range(warmup):
        call()
    accelerator.synchronize(device)
    dd.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        call()
    accelerator.synchronize(device)
    end = time.perf_counter()
    return (end - start) / repeats, (time.process_time() - cpu) / repeats


def repeats_to_fill(block_s: float, seconds: float, least: int, most: int) -> int:
    """Return how many calls of `seconds` fill `block_s`, between `least` and `most`."""
    return max(least, min(most, round(block_s / max(seconds, 1e-9))))


def merge_ranks(timings: Sequence[RankTimings]) -> dict[str, Any]:
    """Merge the timings of all ranks: the slowest rank's seconds, and the sum of CPU seconds."""
    names = list(timings[0].seconds)
    rounds = range(len(timings[0].rounds))
    return {
        "seconds": {name: [max(rank.seconds[name][i] for rank in timings) for i in rounds] for name in names},
        "cpu_s": {name: [sum(rank.cpu_s[name][i] for rank in timings) for i in rounds] for name in names},
        "foreign_cores": [max_foreign_cores([(rank.boot_id, rank.rounds[i]) for rank in timings]) for i in rounds],
    }


def measure_steps(options: StepOptions) -> dict[str, Any]:
    """Time a training step of every contender in an open session; every rank calls this and gets the result."""
    device = dd.device()
    needs_torch = any(name in TORCH_METHODS for name in options.contenders)
    with torch_group(device, options.timeout_s, is_needed=needs_torch):
        case = step_case(options, device, dd.rank())
        trainers = [make_trainer(name, case, device, options.optimizer) for name in options.contenders]
        calls = {each.method: partial(each.step, case) for each in trainers}
        for _ in range(options.warmup):
            for call in calls.values():
                time_call(call, 1, device)
        steps = options.steps
        if not steps:
            middle = median(time_call(call, 1, device)[0] for call in calls.values())
            steps = dd.broadcast_object(repeats_to_fill(options.block_s, middle, MIN_STEPS, MAX_STEPS))
        timings = interleave(calls, steps, options.rounds, device)
        parameters = list(trainers[0].model.parameters())
        return {
            **merge_ranks(dd.allgather_object(timings)),
            "steps": steps,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "tensors": len(parameters),
            "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            "sent_bytes": {each.method: each.sent_bytes() for each in trainers},
            **_compare_parameters(trainers),
        }


def _compare_parameters(trainers: list[Trainer]) -> dict[str, Any]:
    """Compare final parameters between ranks, and with those of the first contender that communicates.

    All of them took the same number of steps from the same parameters.
    """
    digests = dd.allgather_object({each.method: digest(whole_parameters(each.model)) for each in trainers})
    same = {name: len({found[name] for found in digests}) == 1 for name in digests[0]}
    reduced = [each for each in trainers if each.method != "none"]
    differences = {}
    for each in reduced:
        pairs = zip(whole_parameters(each.model), whole_parameters(reduced[0].model), strict=True)
        differences[each.method] = max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
    return {
        "identical_across_ranks": same,
        "difference_from": reduced[0].method if reduced else None,
        "max_difference": differences,
    }


def measure_memory(backend: str, options: StepOptions, topology: Topology, store: Path) -> dict[str, Any]:
    """Measure the memory that one contender adds to a process with all imports done; opens its session if needed.

    On CPUs: peak resident size (VmHWM, with touched shared memory) minus the size before setup, so connections, model,
    optimizer state and activations count. On GPUs: the peak of torch's allocator, without NCCL's buffers.
    """
    (method,) = options.contenders
    kind = None if options.device == "cpu" else accelerator.kind()
    step_case(options, torch.device("cpu"), topology.rank)  # imports what the model needs
    # A session starts Horovod's engine under any launcher.
    needs_session = is_by_dualdist(method) or method == "hvd"
    if registry.uses_library(backend, registry.HOROVOD_LIBRARY) and needs_session:
        training.load_horovod()
    training.load_torch_sharding()  # for all, as it imports much that others import later
    could_reset = reset_peak()
    before = resident_kib()
    device = torch.device("cpu") if kind is None else torch.device(kind, topology.local_rank % accelerator.count())
    with ExitStack() as stack:
        if needs_session:
            dd.init(timeout_s=options.timeout_s)
            stack.callback(dd.shutdown)
            device = dd.device()
        elif method in TORCH_METHODS:
            if kind is not None:
                accelerator.select(device.index)
            rank, size = topology.rank, topology.size
            stack.enter_context(training.torch_group_by_file(store, rank, size, device, options.timeout_s))
        case = step_case(options, device, topology.rank)
        trainer = make_trainer(method, case, device, options.optimizer)
        for _ in range(MEMORY_STEPS):
            trainer.step(case)
        accelerator.synchronize(device)
        peak = accelerator.peak_bytes(device)
        if kind is None and before is not None and could_reset:
            peak = ((resident_kib(peak=True) or 0) - before) * 1024
    return {"contender": method, "peak_bytes": peak, "rank": topology.rank}


def check_sum(options: AllreduceOptions) -> dict[str, Any]:
    """Check one allreduce in an open session: powers of two reveal a rank that is missing or counted twice."""
    result = dd.allreduce(torch.full((1000,), 2 ** dd.rank(), dtype=torch.int64, device=dd.device()), "sum")
    expected = 2 ** dd.size() - 1
    if not bool((result == expected).all()):
        raise CollectiveError(f"the sum over {dd.size()} ranks is {int(result[0])}, expected {expected}")
    return {}


def measure_allreduces(options: AllreduceOptions) -> dict[str, Any]:
    """Time allreduces of every size in an open session; every rank calls this and gets the result."""
    device = dd.device()
    library = registry.get(dd.backend()).library
    if library not in RAW_LIBRARIES:
        raise UnsupportedError(f"no raw library is known beneath the backend {dd.backend()!r}, to compare it with")
    raw = RAW_LIBRARIES[library]()
    if raw.is_cpu_only and device.type != "cpu":
        raise UnsupportedError(f"raw {library} is measured on CPU tensors only: add --device cpu")
    with torch_group(device, options.timeout_s, is_needed=library == "torch.distributed"):
        peers, note = load_allreduces() if session.current().backend.transport == "shm" else ({}, "")
        sizes = [
            _measure_size(nbytes, dtype, raw, peers, options, device)
            for dtype in options.dtypes
            for nbytes in options.sizes
        ]
    return {"library": library, "sizes": sizes, "note": note}


def _measure_size(
    nbytes: int,
    dtype: str,
    raw: Library,
    peers: Mapping[str, Callable[[torch.Tensor], object]],
    options: AllreduceOptions,
    device: torch.device,
) -> dict[str, Any]:
    kind: torch.dtype = getattr(torch, dtype)
    tensor = torch.zeros(max(1, nbytes // kind.itemsize), device=device, dtype=kind)
    name = f"bench.{dtype}.{tensor.numel()}"
    calls: dict[str, Callable[[], object]] = {"dualdist_": lambda: dd.allreduce_(tensor, "sum", name=name)}
    if dtype in raw.dtypes:
        calls["raw_"] = lambda: raw.allreduce_(tensor)
    if dtype in peers:
        calls["deepspeed_"] = lambda: peers[dtype](tensor)
    _check_sums(calls, tensor)
    fastest = min(time_call(call, 2, device, WARMUP_CALLS)[0] for call in calls.values())
    repeats = dd.broadcast_object(repeats_to_fill(options.block_s, fastest, 1, MAX_REPEATS))
    timings = interleave(calls, repeats, options.rounds, device, WARMUP_CALLS)
    return {
        "dtype": dtype,
        "bytes": tensor.nbytes,
        "repeats": repeats,
        **merge_ranks(dd.allgather_object(timings)),
    }


def _check_sums(calls: Calls, tensor: torch.Tensor) -> None:
    """Check that every call sums; leaves zeros in the tensor, whose sum stays zero however often it is reduced."""
    expected = float(sum(range(1, dd.size() + 1)))
    for name, call in calls.items():
        tensor.fill_(dd.rank() + 1)
        call()
        if not bool((tensor == expected).all()):
            raise CollectiveError(f"{name} of {tensor.numel()} elements did not give the sum {expected:g}")
    tensor.zero_()


def train(options: TrainOptions, folder: Path, start_time: float) -> dict[str, Any] | None:
    """Train one contender in an open session; every rank writes its record to the folder.

    Returns:
        Timings of allreduces of `options.sizes`, or why they cannot be measured; None without sizes.
    """
    device = dd.device()
    recorder = recorder_of(session.current(), folder, options.warmup, options.steps, start_time)
    with torch_group(device, options.timeout_s, is_needed=options.method in TORCH_METHODS):
        cases = _batches(options, device)
        trainer = make_trainer(options.method, cases[0], device)
        recorder.start(trainer.model.parameters())
        number = 0
        while not recorder.is_complete:
            start = time.perf_counter()
            loss = trainer.step(cases[number % BATCHES])
            if options.slowdown > 1:
                end = start + options.slowdown * (time.perf_counter() - start)
                while time.perf_counter() < end:
                    pass
            recorder.step(loss)
            number += 1
        recorder.write(trainer.model.parameters(), trainer.sent_bytes())
    if not options.sizes:
        return None
    sweep = AllreduceOptions(options.sizes, ALLREDUCE_ROUNDS, ALLREDUCE_BLOCK_S, options.device, options.timeout_s)
    try:
        return measure_allreduces(sweep)
    except UnsupportedError as error:  # raised on every rank; the training has been recorded
        return {"unmeasured": str(error)}


def _batches(options: TrainOptions, device: torch.device) -> list[TrainingCase]:
    """Return this rank's shard of every global batch, whose samples do not depend on the number of ranks."""
    build = make_case(options, 1, device, 0).build
    batches = (
        make_case(options, options.batch, torch.device("cpu"), options.seed + 1 + 1000 * number)
        for number in range(BATCHES)
    )
    shards = (batch.shard(dd.rank(), dd.size()) for batch in batches)
    return [TrainingCase(build, shard.inputs.to(device), shard.targets.to(device)) for shard in shards]

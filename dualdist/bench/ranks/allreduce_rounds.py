"""Inside the ranks: dualdist's allreduce beside that of the library below it, size after size, taking turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dualdist as dd
from dualdist.bench.cases import AllreduceOptions
from dualdist.bench.ranks import baselines
from dualdist.bench.ranks.interleaving import TimedContender, interleave, repeats_to_fill, timed, together
from dualdist.errors import CollectiveError

MOST_REPEATS = 1000
LEAD_REPEATS = 2
ELEMENT_BYTES = 4  # float32

# name: whether it reduces in place, and against which it is held.
IN_PLACE, OUT_OF_PLACE = "dualdist_", "dualdist"
RAW_IN_PLACE, RAW_OUT_OF_PLACE = "raw_", "raw"


def measure(options: AllreduceOptions) -> dict[str, Any]:
    """The report of a job on an open session; every rank calls this, and gets it."""
    device = dd.device()
    end: Callable[[], None] = _nothing
    if dd.backend() in ("native", "single"):
        end = baselines.start_torch(
            dd.rank(), dd.size(), dd.num_nodes(), dd.broadcast_object, device, options.timeout_s
        )
    try:
        library = baselines.collective_of(dd.backend())
        sizes = [_measure_size(nbytes, library, options, device) for nbytes in options.sizes]
    finally:
        end()
    return {"library": library.name, "sizes": sizes}


def _measure_size(
    nbytes: int, library: baselines.BaselineAllreduce, options: AllreduceOptions, device: torch.device
) -> dict[str, Any]:
    tensor = torch.zeros(max(1, nbytes // ELEMENT_BYTES), device=device)
    name = f"bench.{tensor.numel()}"
    calls: dict[str, Callable[[], object]] = {
        RAW_IN_PLACE: lambda: library.in_place(tensor),
        IN_PLACE: lambda: dd.allreduce_(tensor, "sum", name=name),
        RAW_OUT_OF_PLACE: lambda: library.out_of_place(tensor),
        OUT_OF_PLACE: lambda: dd.allreduce(tensor, "sum", name=f"{name}.new"),
    }
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing
    _check(calls, tensor)
    turns = [TimedContender(each, _repeated(call, LEAD_REPEATS), call) for each, call in calls.items()]
    seconds = [timed(turn, 2, meet=dd.barrier, synchronize=synchronize)[0] for turn in turns]
    repeats = dd.broadcast_object(repeats_to_fill(options.block_s, min(seconds), 1, MOST_REPEATS))
    sight = interleave(
        turns, repeats, options.rounds, meet=dd.barrier, synchronize=synchronize, node_rank=dd.node_rank()
    )
    return {
        "bytes": tensor.numel() * ELEMENT_BYTES,
        "repeats": repeats,
        **together(dd.allgather_object(sight)),
    }


def _check(calls: dict[str, Callable[[], object]], tensor: torch.Tensor) -> None:
    """Every call sums; afterwards the tensor holds zeros, whose sums stay zeros however often they are taken."""
    expected = float(sum(range(1, dd.size() + 1)))
    for name, call in calls.items():
        tensor.fill_(dd.rank() + 1)
        result = call()
        if not bool(((result if isinstance(result, torch.Tensor) else tensor) == expected).all()):
            raise CollectiveError(f"{name} of {tensor.numel()} elements did not give the sum {expected:g}")
    tensor.zero_()


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(times):
            call()

    return repeat


def _nothing() -> None: ...

"""Synthetic launches of a comparison, with chosen step times."""

from collections.abc import Sequence

from dualdist.bench.compare.launches import Launch, RankRecord
from dualdist.utils.machine import machine, machine_cores

WARMUP, STEPS = 2, 5
HOST = {"processor": machine().processor, "cores": machine_cores()}
LOSSES = [2.5, 2.25, 2.0, 1.75, 1.5, 1.25, 1.0]


def rank(number: int, step_s: float, **changes: object) -> RankRecord:
    """Record of one of two ranks on CPUs, whose timed steps all take step_s."""
    found = {
        "rank": number, "ranks": 2, "node_rank": 0, "num_nodes": 1, "backend": "native", "transport": "shm",
        "launcher": "torchrun", "mpi": False, "device": "cpu", "device_versions": {}, "threads": 1,
        "began": 101.0, "ready": 102.0, "first_step": 103.0 + number, "warmup": WARMUP,
        "ends": [0.0, 9.0, *(9.0 + step_s * (number + 1) for number in range(STEPS))],
        "losses": [loss + number for loss in LOSSES], "digest": "d", "start": [1.0, 2.0, 1.0],
        "sample": [1.0, 2.0, 2.0], "rounding": 1.2e-7, "peak_bytes": 100 << 20, "device_peak_bytes": None,
        "tcp_bytes": 1000.0, "cpu_s": 0.5, "window_s": 1.0, "machine_s": 1.0, "own_s": 0.5,
        **HOST,
    }  # fmt: skip
    return RankRecord(**found | changes)


def launch(contender: str, number: int, step_s: float, ranks: int = 2, **changes: object) -> Launch:
    """A launch in the given round; changes are of the launch or of its ranks."""
    own = {name: changes.pop(name) for name in ("label", "seconds", "batch", "allreduce") if name in changes}
    found = {"contender": contender, "label": contender, "round": number, "began": 100.0, "seconds": 5.0, "batch": 16}
    records = [rank(min(1, each), step_s / (1 if each == 0 else 2), **changes) for each in range(ranks)]
    return Launch(command="c", ranks=records, **found | own)


def failed_launch(contender: str, number: int, error: str) -> Launch:
    return Launch(contender=contender, label=contender, round=number, began=0, seconds=1, command="c", error=error)


def launches(contender: str, steps_s: Sequence[float]) -> list[Launch]:
    """One launch per round."""
    return [launch(contender, number, step_s) for number, step_s in enumerate(steps_s)]

"""Program that times a cold start: python cold_start.py raw|dualdist BACKEND SIZE FOLDER DEVICE.

It is started by its path, so that nothing is imported before its clock starts, and "raw" does not need dualdist.

Every rank writes FOLDER/RANK.json: the seconds of `torch` (its import), `import` (of the library without torch),
`init`, `first` and `second` (allreduces of 8 bytes), and the process's `peak_bytes` and `private_bytes` of memory and
number of `sockets`. The ranks wait in FOLDER for each other before init; that wait is not counted, as the difference
between their imports is due to the launcher and the scheduler.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import itertools  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

TIMEOUT_S = 120.0
POLL_S = 0.002

Started = tuple[int, Callable[[], object], Callable[[], object]]  # rank, allreduce, shutdown


def main() -> None:
    kind, backend, size, folder, device = sys.argv[1:]
    sys.path.pop(0)  # this folder
    marks = {"start": START}
    if kind == "dualdist":  # does not import torch; the raw libraries need it first
        library = _import_dualdist()
        marks["import"] = time.perf_counter()
    import torch

    marks["torch"] = time.perf_counter()
    if kind == "raw":
        library = RAW[backend]()
        marks["import"] = time.perf_counter()
    _wait_for_ranks(Path(folder), int(size))
    marks["wait"] = time.perf_counter()
    rank, allreduce, shutdown = library(torch, device)
    marks["init"] = time.perf_counter()
    for name in ("first", "second"):
        allreduce()
        marks[name] = time.perf_counter()
    points = list(marks)
    seconds = {name: marks[name] - marks[before] for before, name in itertools.pairwise(points)}
    del seconds["wait"]
    draft = Path(folder, f"{rank}.draft")
    draft.write_text(json.dumps({"rank": rank, "seconds": seconds, **_resources()}))
    draft.replace(Path(folder, f"{rank}.json"))
    shutdown()


def _wait_for_ranks(folder: Path, size: int) -> None:
    """Wait until all ranks have created a file in the folder."""
    import os

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"here-{os.getpid()}").touch()
    deadline = time.monotonic() + TIMEOUT_S
    while sum(name.startswith("here-") for name in os.listdir(folder)) < size:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all {size} ranks reached {folder} within {TIMEOUT_S:g} s: did one of them fail?")
        time.sleep(POLL_S)


def _resources() -> dict[str, int | None]:
    """Return memory and sockets of this process on Linux, None elsewhere."""
    import os

    def sum_of(file: str, *names: str) -> int | None:
        try:
            lines = [line.split() for line in Path("/proc/self", file).read_text().splitlines()]
        except OSError:
            return None
        return 1024 * sum(int(words[1]) for words in lines if words and words[0].rstrip(":") in names)

    sockets = None
    for entry in list(os.scandir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else ():
        try:
            sockets = (sockets or 0) + os.readlink(entry.path).startswith("socket:")
        except OSError:  # closed since it was listed
            continue
    return {
        "peak_bytes": sum_of("status", "VmHWM"),
        "private_bytes": sum_of("smaps_rollup", "Private_Clean", "Private_Dirty"),
        "sockets": sockets,
    }


def _import_dualdist() -> Callable[[Any, str], Started]:
    import dualdist as dd

    def start(torch: Any, device: str) -> Started:
        dd.init()
        value = torch.zeros(2, device=dd.device())
        return dd.rank(), lambda: dd.allreduce_(value, "sum", name="value"), dd.shutdown

    return start


def _import_torch() -> Callable[[Any, str], Started]:
    import torch.distributed as dist

    def start(torch: Any, device: str) -> Started:
        cuda = device != "cpu" and torch.cuda.is_available()
        if cuda:
            import os

            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        value = torch.zeros(2, device="cuda" if cuda else "cpu")
        return dist.get_rank(), lambda: dist.all_reduce(value), dist.destroy_process_group

    return start


def _import_horovod() -> Callable[[Any, str], Started]:
    import horovod.torch as hvd

    def start(torch: Any, device: str) -> Started:
        hvd.init()
        value = torch.zeros(2)
        return hvd.rank(), lambda: hvd.allreduce_(value, name="value", op=hvd.Sum), hvd.shutdown

    return start


def _import_mpi() -> Callable[[Any, str], Started]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    def start(torch: Any, device: str) -> Started:
        MPI.Init_thread()
        value = torch.zeros(2).numpy()
        world = MPI.COMM_WORLD
        return world.Get_rank(), lambda: world.Allreduce(MPI.IN_PLACE, value, MPI.SUM), MPI.Finalize

    return start


RAW = {"native": _import_torch, "horovod": _import_horovod, "mpi": _import_mpi}

if __name__ == "__main__":
    main()

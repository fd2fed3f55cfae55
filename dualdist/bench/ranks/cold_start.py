"""Times, in a new process, the way to a first collective: python start.py raw|dualdist BACKEND SIZE FOLDER DEVICE.

Every rank leaves FOLDER/RANK.json: seconds for `torch` (its import), `import` (the library's, beside torch), `init`,
`first` and `second` (allreduces of 8 bytes), and what the process then holds: `peak_bytes` and `own_bytes` of memory
(the most that was resident, and what it shares with nobody now) and `sockets`. Ranks wait for each other in FOLDER
before init, and that wait is not counted: how far apart their imports ended is the launcher's and the scheduler's
doing. "raw" needs no dualdist.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import itertools  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

WAIT_S = 120.0
LOOK_S = 0.002

Started = tuple[int, Callable[[], object], Callable[[], object]]  # rank, one allreduce, how to end


def main() -> None:
    kind, backend, size, folder, device = sys.argv[1:]
    sys.path.pop(0)  # this folder, which a program of a user's would not have there
    marks = {"began": BEGAN}
    if kind == "dualdist":  # comes without torch; the raw libraries need it first
        library = _import_dualdist()
        marks["import"] = time.perf_counter()
    import torch

    marks["torch"] = time.perf_counter()
    if kind == "raw":
        library = RAW[backend]()
        marks["import"] = time.perf_counter()
    _meet(Path(folder), int(size))
    marks["met"] = time.perf_counter()
    rank, allreduce, end = library(torch, device)
    marks["init"] = time.perf_counter()
    for name in ("first", "second"):
        allreduce()
        marks[name] = time.perf_counter()
    points = list(marks)
    seconds = {name: marks[name] - marks[before] for before, name in itertools.pairwise(points)}
    del seconds["met"]
    draft = Path(folder, f"{rank}.draft")
    draft.write_text(json.dumps({"rank": rank, "seconds": seconds, **_held()}))
    draft.replace(Path(folder, f"{rank}.json"))
    end()


def _meet(folder: Path, size: int) -> None:
    """All ranks have come this far."""
    import os

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"here-{os.getpid()}").touch()
    deadline = time.monotonic() + WAIT_S
    while sum(name.startswith("here-") for name in os.listdir(folder)) < size:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all {size} ranks came to {folder} within {WAIT_S:g} s: did one of them fail?")
        time.sleep(LOOK_S)


def _held() -> dict[str, int | None]:
    """What Linux says of this process; None elsewhere."""
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
        except OSError:  # closed since: the listing's own, or a connection that a library has ended
            continue
    return {
        "peak_bytes": sum_of("status", "VmHWM"),
        "own_bytes": sum_of("smaps_rollup", "Private_Clean", "Private_Dirty"),
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

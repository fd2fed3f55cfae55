"""Program that times a cold start, and the raw libraries: python cold_start.py dualdist|LIBRARY SIZE FOLDER DEVICE.

It is started by its path, so that nothing is imported before its clock starts, and a raw library runs without dualdist.

Every rank writes FOLDER/RANK.json: the seconds of `torch` (its import), `import` (of the library without torch),
`init`, `first` and `second` (allreduces of 8 bytes), and the process's `peak_bytes` and `private_bytes` of memory and
number of `sockets`. The ranks wait in FOLDER for each other before init; that wait is not counted, as the difference
between their imports is due to the launcher and the scheduler.
"""

import time

START = time.perf_counter()

import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

TIMEOUT_S = 120.0
POLL_S = 0.002


class Library(NamedTuple):
    """A library that has been imported; its allreduces sum."""

    start: Callable[[Any, str], tuple[int, Any]]  # connects the ranks; returns this rank and two zeros on its device
    allreduce_: Callable[[Any], object]  # sums in place
    stop: Callable[[], object]
    is_cpu_only: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")  # the dtypes that it sums


def main() -> None:
    name, size, folder, device = sys.argv[1:]
    sys.path.pop(0)  # this folder
    marks = {"start": START}
    if name == "dualdist":  # does not import torch; the raw libraries need it first
        library = _import_dualdist()
        marks["import"] = time.perf_counter()
    import torch

    marks["torch"] = time.perf_counter()
    if name != "dualdist":
        library = RAW_LIBRARIES[name]()
        marks["import"] = time.perf_counter()
    _wait_for_ranks(Path(folder), int(size))
    marks["wait"] = time.perf_counter()
    rank, value = library.start(torch, device)
    marks["init"] = time.perf_counter()
    for phase in ("first", "second"):
        library.allreduce_(value)
        marks[phase] = time.perf_counter()
    points = list(marks)
    seconds = {name: marks[name] - marks[before] for before, name in itertools.pairwise(points)}
    del seconds["wait"]
    draft = Path(folder, f"{rank}.draft")
    draft.write_text(json.dumps({"rank": rank, "seconds": seconds, **_resources()}))
    draft.replace(Path(folder, f"{rank}.json"))
    library.stop()


def _wait_for_ranks(folder: Path, size: int) -> None:
    """Wait until all ranks have created a file in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"here-{os.getpid()}").touch()
    deadline = time.monotonic() + TIMEOUT_S
    while sum(name.startswith("here-") for name in os.listdir(folder)) < size:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all {size} ranks reached {folder} within {TIMEOUT_S:g} s: did one of them fail?")
        time.sleep(POLL_S)


def _resources() -> dict[str, int | None]:
    """Return memory and sockets of this process on Linux, None elsewhere."""

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


def _import_dualdist() -> Library:
    import dualdist as dd

    def start(torch: Any, device: str) -> tuple[int, Any]:
        dd.init()
        return dd.rank(), torch.zeros(2, device=dd.device())

    # Looked up when they are called: the functions of dualdist import torch, which is a phase apart.
    return Library(start, lambda tensor: dd.allreduce_(tensor, "sum", name="value"), lambda: dd.shutdown())


def _import_torch() -> Library:
    import torch.distributed as dist

    from dualdist.backends.native.libraries import both
    from dualdist.utils import accelerator

    def start(torch: Any, device: str) -> tuple[int, Any]:
        kind = None if device == "cpu" else accelerator.kind()
        chosen = torch.device("cpu") if kind is None else accelerator.select(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(both(chosen.type))
        return dist.get_rank(), torch.zeros(2, device=chosen)

    return Library(start, dist.all_reduce, dist.destroy_process_group)


def _import_horovod() -> Library:
    import horovod.torch as hvd

    def start(torch: Any, device: str) -> tuple[int, Any]:
        hvd.init()
        return hvd.rank(), torch.zeros(2)

    def allreduce_(tensor: Any) -> None:
        hvd.allreduce_(tensor, name=f"raw.in_place.{tensor.numel()}", op=hvd.Sum)

    return Library(start, allreduce_, hvd.shutdown, dtypes=("float32", "float16"))


def _import_mpi() -> Library:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def start(torch: Any, device: str) -> tuple[int, Any]:
        MPI.Init_thread()
        return world.Get_rank(), torch.zeros(2)

    def allreduce_(tensor: Any) -> None:
        world.Allreduce(MPI.IN_PLACE, tensor.numpy(), MPI.SUM)

    return Library(start, allreduce_, MPI.Finalize, is_cpu_only=True, dtypes=("float32",))


# By BackendSpec.library: the libraries beneath backends, used as a program without dualdist uses them.
RAW_LIBRARIES = {"torch.distributed": _import_torch, "horovod.torch": _import_horovod, "mpi4py": _import_mpi}

if __name__ == "__main__":
    main()

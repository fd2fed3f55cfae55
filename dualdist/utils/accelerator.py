"""Accelerators: the file that names kinds of devices, and calls what torch has for them (doctor's probes aside).

CUDA and ROCm have one name in torch. An accelerator whose torch has no collective library is reached through pinned
host memory (dualdist/backends/staging.py), as is every one by a transport of CPU tensors. Importing this imports no
torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# torch's names of accelerators that have a collective library of their own in torch.
CUDA, XPU = "cuda", "xpu"
KINDS = (CUDA, XPU)
# Kinds without streams, on which nothing can wait for what a program has queued.
UNSUPPORTED = ("mps",)
# For each kind, and for ROCm: the function by which Open MPI says that it takes addresses of the device (Open MPI 5,
# MPI extensions "cuda" and "rocm"), and the number by which MPICH's MPIX_GPU_query_support asks for it.
MPI_QUERIES = {CUDA: ("MPIX_Query_cuda_support", 0), "hip": ("MPIX_Query_rocm_support", 2), XPU: ("", 1)}


def kind() -> str | None:
    """Return torch's name of the accelerator that it sees, or None."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in UNSUPPORTED else found.type


def count() -> int:
    """Return how many accelerators this process sees."""
    import torch

    return int(torch.accelerator.device_count()) if kind() else 0


def select(index: int) -> torch.device:
    """Make this accelerator the current one, and return it."""
    import torch

    torch.accelerator.set_device_index(index)
    return torch.device(str(kind()), index)


def current(name: str) -> torch.device:
    """Return this process's current device of a kind, or the CPU."""
    import torch

    return torch.device(name) if name == "cpu" else torch.device(name, torch.accelerator.current_device_index())


def use(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make an accelerator the current one of this thread in the block; nothing for the CPU."""
    import torch

    return torch.get_device_module(device).device(device) if is_accelerator(device) else contextlib.nullcontext()


def is_in_use() -> bool:
    """Return True if this process has used its accelerator."""
    import torch

    name = kind()
    ask = None if name is None else getattr(torch.get_device_module(name), "is_initialized", None)
    return ask is not None and bool(ask())


def is_accelerator(device: torch.device) -> bool:
    """Return True if operations on this device are queued in streams, so that reading its memory waits for them."""
    return device.type != "cpu" and device.type == _kind_of_build()


@functools.cache
def _kind_of_build() -> str:
    """Return the kind of accelerator that this torch was built for, or ""."""
    import torch

    found = torch.accelerator.current_accelerator()
    return "" if found is None or found.type in UNSUPPORTED else found.type


def current_stream(device: torch.device | None) -> torch.Stream | None:
    """Return the stream to which this thread's work on a device goes; None for the CPU."""
    import torch

    return None if device is None or not is_accelerator(device) else torch.accelerator.current_stream(device)


def on_stream(chosen: torch.Stream | None) -> contextlib.AbstractContextManager[None]:
    """Let this thread's work in the block go to a stream, if there is one."""
    return contextlib.nullcontext() if chosen is None else _on_stream(chosen)


@contextlib.contextmanager
def _on_stream(chosen: torch.Stream) -> Iterator[None]:
    import torch

    device, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(chosen.device)
    torch.accelerator.set_stream(chosen)  # and the device
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def is_capturing(device: torch.device) -> bool:
    """Return True if the current stream is captured into a graph."""
    import torch

    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued; at once for the CPU."""
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory that torch has held on an accelerator; None if it is unknown, or the CPU."""
    import torch

    ask = getattr(torch.get_device_module(device), "max_memory_allocated", None) if is_accelerator(device) else None
    return None if ask is None else int(ask(device))


def device_name(device: torch.device) -> str:
    """Return "cpu", or the name of the accelerator's model."""
    import torch

    if not is_accelerator(device):
        return device.type
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if ask is None else str(ask(device))


def library_versions(device: torch.device) -> dict[str, str]:
    """Return the versions of the device's toolkit and collective library by name, as far as torch tells them."""
    import torch

    if device.type != CUDA:
        return {}
    toolkit = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    named = {name: version for name, version in toolkit.items() if version}
    return {**named, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}


def nccl_version() -> int:
    """Return the version of torch's NCCL as a number, as NCCL does since 2.9."""
    import torch

    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(10000 * major + 100 * minor + patch)


def random_state(device: torch.device | None) -> dict[str, torch.Tensor]:
    """Return the state of the device's random generator by its kind; nothing for the CPU."""
    import torch

    ask = None if device is None else getattr(torch.get_device_module(device), "get_rng_state", None)
    return {} if device is None or ask is None or not is_accelerator(device) else {device.type: ask(device)}


def set_random_state(state: dict[str, Any], device: torch.device | None) -> None:
    """Set the state that random_state() returned, if it has one of this kind of device."""
    import torch

    if device is not None and is_accelerator(device) and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def seed(number: int, device: torch.device | None) -> None:
    """Seed the device's random generator; nothing for the CPU."""
    import torch

    if device is not None and is_accelerator(device):
        with use(device):
            getattr(torch.get_device_module(device), "manual_seed", torch.manual_seed)(number)


def mpi_takes_addresses(library: str) -> bool:
    """Return True if the MPI that `library` is linked to accepts addresses of the accelerator's memory."""
    import torch

    name = kind()
    query, number = MPI_QUERIES.get("hip" if torch.version.hip else name or "", ("", None))
    symbols = ctypes.CDLL(library)
    if query and hasattr(symbols, query):  # Open MPI, and MPICH since version 4
        return bool(getattr(symbols, query)())
    if number is not None and hasattr(symbols, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        failed = symbols.MPIX_GPU_query_support(number, ctypes.byref(answer))
        return not failed and bool(answer.value)
    return False

"""A simulated accelerator for tests: torch.device("simulated"), see device.cpp. A process that imports this has it."""

from __future__ import annotations

import contextlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
from harness.accelerator.build import build, name_of

NAME = "simulated"


def load() -> ModuleType:
    path = build()
    spec = importlib.util.spec_from_file_location(name_of(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DeviceModule(ModuleType):
    """What torch finds as torch.simulated."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """There is one."""

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers come from the CPU's generator."""


def register_library() -> None:
    """Give the accelerator a collective library of its own, as NCCL is CUDA's."""
    from harness.accelerator import library

    library.register()


torch.utils.rename_privateuse1_backend(NAME)
_module = load()
torch._register_device_module(NAME, DeviceModule(NAME))
torch.utils.generate_methods_for_privateuse1_backend()
host_waits, alias_on_host, enqueue = _module.host_waits, _module.alias_on_host, _module.enqueue

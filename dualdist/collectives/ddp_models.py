"""Remember the models that are put into torch's DistributedDataParallel, which records them nowhere.

The group imports this, so that every model since dd.init() is known when its optimizer is wrapped.
"""

from __future__ import annotations

import weakref

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _remember(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _models.add(module)


register_module_module_registration_hook(_remember)


def params_in_ddp() -> set[int]:
    """Return the ids of the parameters whose gradients DistributedDataParallel reduces."""
    return {id(param) for model in _models for param in model.parameters()}

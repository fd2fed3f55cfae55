"""A program's objects as they are on this rank, to go back to, and rank 0's on every rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dualdist.checkpoint.files import EXTRA, METADATA
from dualdist.checkpoint.state import collect_state, dtypes_of, has_state, load_state
from dualdist.collectives.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from dualdist.collectives.group import Group
from dualdist.collectives.objects import allgather_object, broadcast_object
from dualdist.data.sampler import Sampler
from dualdist.errors import UsageError
from dualdist.utils import random_state
from dualdist.utils.random_state import RandomState

ROOT = 0


@dataclass(frozen=True)
class StateCopy:
    """The states of objects, plain data and random generators, as they were; in the CPU's memory."""

    content: Mapping[str, Any]
    random: RandomState

    @staticmethod
    def of(parts: Mapping[str, Any], device: torch.device) -> StateCopy:
        content = collect_state(parts, copy=True)
        optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        content[METADATA] = {"dtypes": {name: dtypes_of(part) for name, part in optimizers.items()}}
        return StateCopy(content, random_state.get_random_state(device))

    def put_back(self, objects: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """The objects and random generators are as they were; returns the plain data, which belong to the caller."""
        content = copy.deepcopy(dict(self.content))  # objects go on to change what they are given
        load_state(objects, content)
        random_state.set_random_state(self.random, device)
        plain: dict[str, Any] = content[EXTRA]
        return plain


def broadcast_state(group: Group, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Every rank's objects have rank 0's state; returns rank 0's plain data. Every rank calls this."""
    kinds = allgather_object(
        group, {name: type(part).__name__ if has_state(part) else "plain data" for name, part in parts.items()}
    )
    if any(found != kinds[ROOT] for found in kinds):
        raise UsageError(f"the ranks' states are made of different parts: {'; '.join(map(str, kinds))}")
    for name in sorted(parts):
        part = parts[name]
        if isinstance(part, torch.nn.Module):
            broadcast_parameters(group, part, ROOT)
        elif isinstance(part, torch.optim.Optimizer):
            broadcast_optimizer_state(group, part, ROOT)
        elif has_state(part):
            state = broadcast_object(group, part.state_dict() if group.rank == ROOT else None, ROOT)
            if group.rank != ROOT or isinstance(part, Sampler):  # which shares out anew what is left
                part.load_state_dict(state)
    plain = {name: part for name, part in parts.items() if not has_state(part)}
    return broadcast_object(group, plain, ROOT)

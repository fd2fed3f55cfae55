"""Comparisons between the ranks of a reducer: whether all began with the same values and took the same steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from dualdist.backends.control_plane import exchange
from dualdist.collectives.consistency import Options, difference, digest
from dualdist.ddp.parameters import ParamRegistry
from dualdist.errors import CollectiveError, DriftError
from dualdist.utils.suggest import format_ranks


def require_same_start(registry: ParamRegistry, *, was_first: bool) -> None:
    """Raise DriftError on every rank unless all ranks begin with the same parameters.

    Called after the first reduction without joined ranks. If there was one with them, some ranks did not step.
    """
    options = registry.source.options()
    own, name = _digest_of(registry.owned_params(), options) if was_first else "", f"{registry.name}.digests"
    found = {*registry.channel.run(name, lambda backend: exchange(backend, own.encode(), name))}
    if len(found) == 1 or b"" in found:
        return
    owned = {*map(id, registry.owned_params())}
    tensors = [(name, param) for name, param in registry.tensors_in_order() if id(param) in owned]
    name = f"{registry.name}.start"
    how = registry.channel.run(name, lambda backend: difference(backend, tensors, name, options))
    raise DriftError(
        f"before the first step {how}. Call dd.broadcast_parameters(model) and "
        "dd.broadcast_optimizer_state(optimizer) before the training, so that all ranks begin with the same values"
    )


def require_same_steps(registry: ParamRegistry, *, has_stepped: bool) -> None:
    """Raise, on every rank, as only some have stepped since the reduction before: Note [skipped steps]."""
    advice = (
        "left out a step that other ranks took, so that their parameters differ now. All ranks step, or none: "
        "decide by a value that all have, as by dd.allreduce(loss), and end the program after an exception that "
        "left backward() or step()"
    )
    if registry.buckets[-1].reads_flags_late:  # the others have not read them
        raise CollectiveError(f"this rank {advice}")
    name, own = f"{registry.name}.steps", bytes([has_stepped])
    rows = registry.channel.run(name, lambda backend: exchange(backend, own, name))
    skipped = [rank for rank, row in zip(registry.group.ranks, rows, strict=True) if not row[0]]
    raise DriftError(f"{format_ranks(skipped)} {advice}")


def _digest_of(params: Sequence[torch.Tensor], options: Options) -> str:
    return f"{digest(params)}{hashlib.sha256(repr(options).encode()).hexdigest()}"

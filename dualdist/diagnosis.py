"""What a training script asks where something seems wrong: each finds the open session and hands over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dualdist import session
from dualdist.collectives.compile import uncompiled

if TYPE_CHECKING:
    import torch

    from dualdist.collectives.group import Group
    from dualdist.monitoring.wait_times import SlowRanks


@uncompiled
def check_consistency(
    model: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    *,
    buffers: bool = False,
    group: Group | None = None,
) -> None:
    """All ranks hold the same bits in the parameters of `model`, or DriftError on every rank says where they do not.

    Every rank calls this with a model of the same names and shapes: a module, a state_dict or named tensors. The error
    names the first parameter that differs, the ranks that differ from the others and by how much, and says where they
    hold NaN or infinite values; equal bits are equal, NaN too. What batch norm has counted is each rank's own, and
    compared with buffers=True only. Tensors stay where they are: what travels is 64 bytes.

    >>> dd.check_consistency(torch.nn.Linear(2, 1))
    """
    from dualdist.collectives import consistency

    consistency.check_consistency(session.group_or_world(group), model, buffers=buffers)


@uncompiled
def slow_ranks(*, group: Group | None = None) -> SlowRanks:
    """Who has waited for whom in operations and gradients, and how long, since the last call; every rank calls this.

    The first call begins to count. What is returned is the same on every rank and prints as a table: `slowest` is the
    rank for which the others waited most, or None, `caused_s` what each of the others waited for a rank, by rank, and
    `waited_s` what a rank waited. With DUALDIST_SLOW_RANKS=1 counting begins with init(), and rank 0 prints a table at
    the end. Only waits of the program count: on a GPU those that its stream does by itself do not.

    >>> dd.slow_ranks().slowest is None
    True
    """
    from dualdist.diagnostics import stragglers

    return stragglers.slow_ranks(session.group_or_world(group))

"""The laws that hold on every backend under every launcher, in the order in which a job goes through them."""

from __future__ import annotations

from contract import (
    adasum_laws,
    check_laws,
    checkpoint_laws,
    collective_laws,
    derivative_laws,
    face_laws,
    gradient_laws,
    habit_laws,
    memory_laws,
    optimizer_laws,
    quick_laws,
    rooted_laws,
    rounds_laws,
    sync_batch_norm_laws,
    vocabulary_laws,
    wrapping_laws,
)
from contract.oracle import ALONE, LAWS, batch, digest, loss_of, net, raises

__all__ = [
    "ALONE",
    "LAWS",
    "adasum_laws",
    "batch",
    "check_laws",
    "checkpoint_laws",
    "collective_laws",
    "derivative_laws",
    "digest",
    "face_laws",
    "gradient_laws",
    "habit_laws",
    "loss_of",
    "memory_laws",
    "net",
    "optimizer_laws",
    "quick_laws",
    "raises",
    "rooted_laws",
    "rounds_laws",
    "sync_batch_norm_laws",
    "vocabulary_laws",
    "wrapping_laws",
]

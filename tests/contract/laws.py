"""The laws that hold on every backend under every launcher, in the order in which a job goes through them."""

from __future__ import annotations

from contract import collective_laws, gradient_laws, sync_batch_norm_laws, vocabulary_laws
from contract.oracle import ALONE, LAWS, batch, digest, loss_of, net, raises

__all__ = [
    "ALONE",
    "LAWS",
    "batch",
    "collective_laws",
    "digest",
    "gradient_laws",
    "loss_of",
    "net",
    "raises",
    "sync_batch_norm_laws",
    "vocabulary_laws",
]

"""Mixed precision, for --amp: float16 with a scaled loss on GPUs, bfloat16 on CPUs."""

from __future__ import annotations

import torch

import dualdist as dd

HELP = "compute in float16 on GPUs, in bfloat16 on CPUs"


def autocast(enabled: bool) -> torch.autocast:
    kind = dd.device().type
    return torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16, enabled=enabled)


def grad_scaler(enabled: bool) -> torch.amp.GradScaler:
    kind = dd.device().type
    return torch.amp.GradScaler(kind, enabled=enabled and kind == "cuda")

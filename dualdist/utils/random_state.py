"""The states of all random generators that a training program draws from: torch's, Python's and NumPy's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]  # plain numbers, texts and tensors: what torch loads with weights_only=True


def get_random_state(device: torch.device | None = None) -> RandomState:
    """The states as they are; with a CUDA device, that of its generator too."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: RandomState, device: torch.device | None = None) -> None:
    """Go on from the states."""
    torch.default_generator.set_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_generators(number: int, device: torch.device | None = None) -> None:
    """Begin anew from a number of 64 bits."""
    # Not torch.manual_seed(): in a process that never uses its GPU it remembers a stack trace every time.
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def make_random_state(number: int) -> RandomState:
    """The states after seed(number); the program's own are left alone."""
    own = get_random_state()
    try:
        seed_generators(number)
        return get_random_state()
    finally:
        set_random_state(own)


def derive_seed(*parts: object) -> int:
    """63 bits that depend on all parts, alike in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def use_random_state(state: RandomState) -> Iterator[None]:
    """A block that draws from `state`, which goes on with it, and leaves the program's own states alone."""
    own = get_random_state()
    set_random_state(state)
    try:
        yield
    finally:
        state.update(get_random_state())
        set_random_state(own)

"""States of the random generators of a training program: torch's, Python's and NumPy's."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dualdist.utils import accelerator

RandomState = dict[str, Any]  # numbers, strings and tensors, which torch loads with weights_only=True


def get_random_state(device: torch.device | None = None) -> RandomState:
    """Return the current states; with an accelerator, including that of its generator, by the device's type."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }
    return state | accelerator.random_state(device)


def set_random_state(state: RandomState, device: torch.device | None = None) -> None:
    torch.default_generator.set_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    accelerator.set_random_state(state, device)


def seed_generators(number: int, device: torch.device | None = None) -> None:
    """Seed all generators with a 64-bit number."""
    # Not torch.manual_seed(): in a process that never uses its GPU it keeps a stack trace on each call.
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
    accelerator.seed(number, device)


def make_random_state(number: int) -> RandomState:
    """Return the states after seed_generators(number), without changing the current ones."""
    state = get_random_state()
    with use_random_state(state):
        seed_generators(number)
    return state


def derive_seed(*parts: object) -> int:
    """Return a 63-bit hash of the parts, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def use_random_state(state: RandomState) -> Iterator[None]:
    """Draw from `state` in the block, advance it, and restore the current states afterwards."""
    saved = get_random_state()
    set_random_state(state)
    try:
        yield
    finally:
        state.update(get_random_state())
        set_random_state(saved)

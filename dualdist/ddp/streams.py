"""Gradients that a GPU computes on several streams.

Note [streams]: autograd works through each part of the graph on the stream on which its forward ran, and lets the
caller's stream wait for all of them when backward ends. A bucket that leaves before has to wait for itself: on the
stream on which its last gradient was finished, for those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dualdist.errors import UnsupportedError


class Streams:
    """Those on which the gradients of one bucket were finished. The host waits for none of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[torch.cuda.Stream] = set()

    def note(self) -> None:
        """A gradient has been finished on the current stream."""
        self._seen.add(torch.cuda.current_stream(self._device))

    def join(self, tensors: Sequence[torch.Tensor]) -> None:
        """The current stream goes on when all have come so far; it reads the tensors, which may be freed before."""
        current = torch.cuda.current_stream(self._device)
        others = self._seen - {current}
        for other in others:
            current.wait_stream(other)
        for tensor in tensors if others else ():
            tensor.record_stream(current)

    def forget(self) -> None:
        """They are those of a round that is over."""
        self._seen.clear()


def refuse_capture() -> None:
    """UnsupportedError where the current stream is being captured into a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "backward() of a wrapped optimizer's parameters cannot be captured in a CUDA graph: before gradients are "
            "reduced the ranks tell each other what they have, which a replay would leave out. "
            "torch.cuda.make_graphed_callables captures a model's own work, and leaves the reduction outside"
        )

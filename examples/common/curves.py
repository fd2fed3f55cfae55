"""Curves of a training, drawn by rank 0: for TensorBoard with --tensorboard DIR, as a picture with --plot."""

from __future__ import annotations

import argparse
from typing import Any

from common.ranks import fail, is_root

FLAGS: dict[str, dict[str, Any]] = {
    "tensorboard": {"metavar": "DIR", "help": "write curves there (extra: curves)"},
    "plot": {
        "metavar": "FILE",
        "nargs": "?",
        "const": "curves.png",
        "help": "draw curves (extra: curves; default: curves.png)",
    },
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    for name, settings in FLAGS.items():
        parser.add_argument(f"--{name}", **settings)


class Curves:
    """Values over steps, rank 0's alone; nothing where neither flag was given."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._picture: str | None = options.plot if is_root() else None
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._writer: Any = None
        try:  # now, not when the training is done
            if self._picture:
                import matplotlib.figure  # noqa: F401
            if options.tensorboard and is_root():
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(options.tensorboard)
        except ImportError as error:
            fail(f"--plot and --tensorboard: {error}; pip install matplotlib tensorboard")

    def add(self, step: int, **values: float) -> None:
        for name, value in values.items():
            self._points.setdefault(name, []).append((step, value))
            if self._writer is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """What was added is on the disk, one panel for each name in the picture."""
        if self._writer is not None:
            self._writer.close()
        if not self._picture or not self._points:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4 * len(self._points), 3), layout="constrained")
        panels = figure.subplots(1, len(self._points), squeeze=False)[0]
        for axes, (name, points) in zip(panels, self._points.items(), strict=True):
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None)
            axes.set(title=name, xlabel="step")
        figure.savefig(self._picture)

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

# As the plots of `dualdist compare`.
STYLE: dict[str, Any] = {
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **{name: "#5b6675" for name in ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")},
    "axes.grid": True,
    "grid.color": "#dfe4ea",
    "text.color": "#1c2430",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
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
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(4.2 * len(self._points), 3.2), layout="constrained")
            panels = figure.subplots(1, len(self._points), squeeze=False)[0]
            for axes, (name, points) in zip(panels, self._points.items(), strict=True):
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None)
                axes.set_title(f"{name}, {points[-1][1]:.3g} at the end")
                axes.set_xlabel("step")
            figure.savefig(self._picture, dpi=144)

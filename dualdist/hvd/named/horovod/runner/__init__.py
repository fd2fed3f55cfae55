"""`horovod.runner` under the alias: `run`."""

from __future__ import annotations

from dualdist.hvd.run import run

__all__ = ["run"]

"""`horovod.runner` under the alias: `run`."""

from __future__ import annotations

from dualdist.hvd.running import run

__all__ = ["run"]

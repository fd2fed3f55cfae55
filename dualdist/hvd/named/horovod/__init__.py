"""The package `horovod` under the alias: its version and `run`; importing it puts the alias in place."""

from __future__ import annotations

from dualdist.hvd.alias import install
from dualdist.hvd.run import run

__version__ = "0.28.1"
__all__ = ["run"]

install()

"""The package `horovod` under the alias: its version and `run`; importing it installs the alias."""

import importlib

from dualdist.hvd.alias import install
from dualdist.hvd.run import run

__version__ = "0.28.1"
__all__ = ["run"]

install()
vars(importlib.import_module("horovod.runner"))["run"] = run  # the alias makes horovod.runner an empty package

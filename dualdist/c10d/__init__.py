"""dualdist's transports beneath torch.distributed: `init_process_group("dualdist")`.

Importing this registers the backend. torch does so by itself while it is being imported, by this package's entry point
in the group `torch.backends`, in every program of an environment in which dualdist is installed: the package's API
is imported then (20 ms), and what needs torch not before a process group is created. TORCH_DEVICE_BACKEND_AUTOLOAD=0
turns it off.
"""

import os
from typing import Any

from dualdist.utils.variables import TORCH_BACKEND

NAME = "dualdist"


def register() -> None:
    """Make `init_process_group("dualdist")` known to torch, and put the backend of the variable in place of others."""
    import torch.distributed as dist  # not above: a program may import this first, and torch then calls register()

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        # torch 2.15 attaches its flight recorder to groups of other backends, and fails for one that replaces torch's.
        recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(NAME)
        if name := os.environ.get(TORCH_BACKEND):
            from dualdist.c10d.torch_backend import TorchBackend

            TorchBackend(name).install()


def _create(given: Any, options: object) -> Any:
    from dualdist.c10d.connection import create_group

    return create_group(given)


register()

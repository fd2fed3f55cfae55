"""Run a program where torchvision may not fit torch, as here: some libraries import it where it is installed.

    python plugin_program.py [--dualdist] PROGRAM [ARGUMENT ...]

With --dualdist it sets the default process group up before, on the backend dualdist, which is what a program does whose
library has a list of backends; the library then takes that group.
On Gloo it ends without Python's cleaning up: torch 2.13 may abort where a model in DDP is left then.
"""

import os
import runpy
import sys

from dualdist.utils.torchvision_import import load_torchvision

if __name__ == "__main__":
    load_torchvision()
    del sys.argv[0]
    on_dualdist = sys.argv[0] == "--dualdist"
    if on_dualdist:
        import torch.distributed as dist

        import dualdist.c10d

        dist.init_process_group(dualdist.c10d.NAME)
        del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    if not on_dualdist:  # which MPI would take for a failure
        os._exit(0)

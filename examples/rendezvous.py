"""Ranks that are started by hand, one in each terminal, and meet as torch.distributed's init_method says it.

    python examples/rendezvous.py --init-method tcp://127.0.0.1:29400 --rank 0 --world-size 2 &
    python examples/rendezvous.py --init-method tcp://127.0.0.1:29400 --rank 1 --world-size 2

With tcp://host:port it is a free port on rank 0's host. With file:///folder/name it is a file that does not exist yet,
in a folder that all ranks share. env://, the default, means that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
Launchers do all this by themselves: under torchrun, horovodrun, mpirun or srun, dd.init() needs none of it.
"""

from __future__ import annotations

import os

import torch

import dualdist as dd
from common.help import parser


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--init-method", default="env://", metavar="URL", help="where the ranks meet")
    flags.add_argument("--rank", type=int, help="0 or more, below the world size")
    flags.add_argument("--world-size", type=int, help="how many ranks there are")
    options = flags.parse_args()
    if options.init_method != "env://":
        if options.rank is None or options.world_size is None:
            flags.error(f"--init-method {options.init_method}: needs --rank and --world-size")
        os.environ["DUALDIST_RANK"] = str(options.rank)
        os.environ["DUALDIST_SIZE"] = str(options.world_size)
        os.environ["DUALDIST_RENDEZVOUS"] = options.init_method
    dd.init(timeout_s=60)
    total = dd.allreduce(torch.tensor(dd.rank()), "sum")
    print(f"rank {dd.rank()} of {dd.size()} met the others by {options.init_method}: all ranks add up to {total}")
    dd.shutdown()


if __name__ == "__main__":
    main()

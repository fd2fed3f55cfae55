"""The program of the two ranks that try a fresh Horovod: known values, reduced and compared."""

from __future__ import annotations

import argparse
import sys

SIZE = 2
LENGTH = 1000


def main() -> int:
    """0 if this rank got the right sums over the right transport."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--expect", choices=("cpu", "nccl"), default="cpu")
    parser.add_argument("transport", choices=("gloo", "mpi"))
    arguments = parser.parse_args()

    import horovod.torch as hvd
    import torch

    hvd.init()
    if hvd.size() != SIZE:
        print(f"trial: a world of {hvd.size()}, expected {SIZE}", file=sys.stderr)
        return 1
    enabled = hvd.gloo_enabled() if arguments.transport == "gloo" else hvd.mpi_enabled()
    if not enabled:
        print(f"trial: {arguments.transport} does not carry the ranks", file=sys.stderr)
        return 1
    if arguments.expect == "nccl" and not hvd.nccl_built():
        print("trial: NCCL was not built in", file=sys.stderr)
        return 1
    on_gpu = arguments.expect == "nccl" and torch.cuda.device_count() >= SIZE
    device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.float16):
        ramp = torch.arange(LENGTH, device=device) % 97
        summed = hvd.allreduce((ramp * (hvd.rank() + 1)).to(dtype), op=hvd.Sum, name=f"trial.{dtype}")
        if not torch.equal(summed, (ramp * 3).to(dtype)):
            print(f"trial: wrong sums of {dtype} on rank {hvd.rank()}", file=sys.stderr)
            return 1
    print(f"trial: rank {hvd.rank()} of {hvd.size()} got the right sums on {device.type}", flush=True)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Program of the two ranks that test a new Horovod: allreduce known values and compare the sums.

python -m dualdist.horovod_build.smoke_test gloo|mpi cpu|gpu
"""

import sys

SIZE = 2
LENGTH = 1000


def main() -> int:
    """Return 0 if this rank got correct sums over the expected transport."""
    transport, device_kind = sys.argv[1:]
    import horovod.torch as hvd
    import torch

    hvd.init()
    rank = hvd.rank()
    if hvd.size() != SIZE:
        return _fail(f"the size is {hvd.size()}, expected {SIZE}")
    if not (hvd.gloo_enabled() if transport == "gloo" else hvd.mpi_enabled()):
        return _fail(f"Horovod does not run over {transport}")
    if device_kind == "gpu" and not hvd.nccl_built():
        return _fail("Horovod was built without NCCL")
    on_gpu = device_kind == "gpu" and torch.cuda.device_count() >= SIZE
    device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.float16):
        ramp = torch.arange(LENGTH, device=device) % 97
        result = hvd.allreduce((ramp * (rank + 1)).to(dtype), op=hvd.Sum, name=f"smoke_test.{dtype}")
        if not torch.equal(result, (ramp * 3).to(dtype)):
            return _fail(f"wrong sums of {dtype} on rank {rank}")
    print(f"smoke test: rank {rank} of {hvd.size()}: correct sums on {device.type}", flush=True)
    hvd.shutdown()
    return 0


def _fail(problem: str) -> int:
    print(f"smoke test: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""A Horovod script without a word of dualdist, started by `python -m dualdist.hvd`; it reports what `horovod` was."""

import sys

import horovod
import horovod.torch as hvd
import torch
from harness import problem
from harness.jobs import report
from horovod.torch.mpi_ops import allgather


def main() -> None:
    hvd.init()
    rank = hvd.rank()
    model = problem.make_model()
    if rank != 0:
        with torch.no_grad():
            next(model.parameters()).zero_()  # rank 0's must win
    optimizer = problem.make_optimizer(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
    for step in range(problem.STEPS):
        optimizer.zero_grad()
        problem.loss_of(model, rank, step).backward()
        optimizer.step()
    seen = {
        "rank": rank,
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "sum": hvd.allreduce(torch.tensor([1 << rank, 1 << 40]), op=hvd.Sum).tolist(),
        "mean": hvd.allreduce(torch.tensor([float(rank)]), name="mean").item(),
        "gathered": allgather(torch.full((rank + 1,), rank)).tolist(),
        "object": hvd.broadcast_object({"root": rank}, root_rank=0),
        "parameters": problem.flat(model),
        "version": horovod.__version__,
        "face": hvd.allreduce.__module__.partition(".")[0],
        "backend": sys.modules["dualdist"].backend() if "dualdist" in sys.modules else None,
        "arguments": sys.argv[1:],
    }
    hvd.shutdown()
    report(rank, seen)


if __name__ == "__main__":
    main()

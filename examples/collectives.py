"""Prints what each collective operation does to a small tensor on every rank.

dualdist run -np 2 examples/collectives.py
"""

from __future__ import annotations

import torch

import dualdist as dd
from common.help import parser


def main() -> None:
    parser(__doc__).parse_args()
    dd.init()
    # Row i of rank r holds 10 r + i: the tens say where a number came from, the ones which row it was.
    x = 10.0 * dd.rank() + torch.arange(dd.size(), device=dd.device())
    results = {
        "each rank has": x,
        "allreduce sum": dd.allreduce(x, "sum"),
        "allreduce mean": dd.allreduce(x),
        "allgather": dd.allgather(x),
        "broadcast from 0": dd.broadcast(x, root=0),
        "scatter from 0": dd.scatter(x, root=0),
        "gather on 0": dd.gather(x, root=0),
        "alltoall": dd.alltoall(x),
        "reducescatter sum": dd.reducescatter(x, "sum"),
    }
    columns = dd.allgather_object([words(result) for result in results.values()])
    if dd.rank() == 0:
        print(f"{dd.size()} ranks, {dd.backend()} over {dd.transport()}")
        print(table(list(results), columns))
    dd.shutdown()


def words(tensor: torch.Tensor) -> str:
    return " ".join(f"{value:g}" for value in tensor.tolist()) or "nothing"


def table(names: list[str], columns: list[list[str]]) -> str:
    """One line for each name, one column for each rank."""
    cells = [["", *names], *([f"rank {rank}", *column] for rank, column in enumerate(columns))]
    widths = [max(map(len, column)) for column in cells]
    lines = zip(*cells, strict=True)
    return "\n".join("   ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    main()

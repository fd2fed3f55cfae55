"""What the measurements of `dualdist bench` are called, and the help that each shows first."""

from __future__ import annotations

WHATS = {
    "step": "one training step beside DDP and raw Horovod",
    "allreduce": "latency and bandwidth beside the raw library",
    "startup": "from import to a first collective",
    "scale": "a fitted model, and what it predicts for many ranks",
}
EVERY = {
    "ranks": "how many ranks, on this host",
    "backend": "as native,horovod:mpi (default: all usable)",
    "rounds": "how often the contenders take turns",
    "env": "a variable for every rank; again for more",
    "json": "write JSON to FILE as well, or - for stdout alone",
    "dry_run": "print the command lines and do nothing",
}
# Of each part, the usual options and examples.
HELP: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "step": (
        {"model": "resnet18, mlp, ...; again for more", "launches": "start the whole job so often", **EVERY},
        (
            "dualdist bench step --model resnet18 --launches 5",
            "dualdist bench step --backend native:shm,native:gloo,mpi",
        ),
    ),
    "allreduce": (
        {"sizes": "these sizes in bytes alone, as 8,64K,25M", "max_bytes": "the largest tensor", **EVERY},
        ("dualdist bench allreduce --backend native,horovod:mpi",),
    ),
    "startup": (EVERY, ("dualdist bench startup -np 8", "dualdist bench startup --ranks 1,2,4,8")),
    "scale": (
        {"model": "whose step is measured on one rank", "measure_up_to": "launch no more ranks than these"}
        | EVERY
        | {"backend": "one, as horovod:mpi (default: native)"},
        ("dualdist bench scale --ranks 2,4,8,64,512",),
    ),
}

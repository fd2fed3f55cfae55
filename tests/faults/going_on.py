"""The training of elastic_rank.py: what starts it, and starts it again, and what its ranks must have seen."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from faults import elastic_rank

PROGRAM = str(Path(__file__).with_name("elastic_rank.py"))
SIZE = 2
RUN = [sys.executable, "-m", "dualdist", "run", "-np", str(SIZE), "--launcher"]
# What starts the ranks, and starts them again once.
RESTARTING = {
    "torchrun": ["torchrun", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={SIZE}", "--max-restarts=1"],
    **{name: [*RUN, name, "--max-restarts", "1"] for name in ("horovodrun", "horovodrun-mpi", "mpirun", "spawn")},
}


def assert_seen_once(report: Mapping[str, Any]) -> None:
    for epoch in range(elastic_rank.EPOCHS):
        seen = chain(*(samples for number, *samples in report["seen"] if number == epoch))
        assert sorted(seen) == list(range(elastic_rank.SAMPLES))

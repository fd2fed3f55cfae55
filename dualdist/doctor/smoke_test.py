"""What every rank of `dualdist doctor --run` does: joins, takes part in one allreduce, says what it ran on, and leaves.

python -m dualdist.doctor.smoke_test [--spawn RANKS] FOLDER TIMEOUT_S
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dualdist.launch.spawn import spawn_apart

SPAWN = "--spawn"


def work(folder: str, timeout_s: float) -> None:
    """One rank's part; AssertionError where the sum is wrong."""
    import torch

    import dualdist as dd

    dd.init(timeout_s=timeout_s)
    rank, size = dd.rank(), dd.size()
    # Powers of two: a rank that is missing or counted twice shows. On the device on which it would train.
    found = dd.allreduce(torch.full((1000,), 2**rank, dtype=torch.int64, device=dd.device()), "sum")
    expected = 2**size - 1
    if not bool((found == expected).all()):
        raise AssertionError(f"the sum over {size} ranks is {int(found[0])}, expected {expected}")
    told = {"rank": rank, "backend": dd.backend(), "transport": dd.transport(), "launcher": dd.launcher()}
    dd.shutdown()
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(told))


def main(words: Sequence[str]) -> int:
    if words[0] == SPAWN:
        spawn_apart(work, int(words[1]), (words[2], float(words[3])))
    else:
        work(words[0], float(words[1]))
    return 0


if __name__ == "__main__":
    # By its full name, which the new processes can import: theirs is another __main__.
    from dualdist.doctor import smoke_test

    sys.exit(smoke_test.main(sys.argv[1:]))

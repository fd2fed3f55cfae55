"""A launcher for measurements: python -m dualdist.bench.ranks.spawned RANKS WORD ... runs the worker by dd.spawn."""

from __future__ import annotations

import sys

from dualdist.launch.spawn import spawn_without_main


def work(words: list[str]) -> int:
    """What each rank runs."""
    from dualdist.bench.ranks import worker

    return worker.main(words)


def main() -> int:
    ranks, *words = sys.argv[1:]
    return max(spawn_without_main(work, int(ranks), (words,)))


if __name__ == "__main__":
    # By its full name, which the new processes can import: theirs is another __main__.
    from dualdist.bench.ranks import spawned

    raise SystemExit(spawned.main())

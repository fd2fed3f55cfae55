"""Starts the contract's ranks by dd.spawn: python spawner.py RANKS [BACKEND]."""

import sys

from contract import rank

import dualdist as dd

if __name__ == "__main__":
    ranks, *backend = sys.argv[1:]
    dd.spawn(rank.main, int(ranks), ([],), backend=backend[0] if backend else None)

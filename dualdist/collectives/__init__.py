"""Collective operations on groups of ranks, independent of the backend.

The path of a call: collectives.py describes the collective. The call (handle.py) sends a request in its group
(group.py), which compares the requests of all ranks before data moves (negotiation.py). fast_allreduce.py is the short
path of a blocking allreduce on CPUs.
"""

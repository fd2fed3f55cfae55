"""Shared memory between the ranks of a host, which the native backend uses."""

"""Collective operations on groups of ranks, independent of the backend."""

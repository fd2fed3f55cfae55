"""Shared memory between the ranks of a host: tensors of the native backend, small messages of every backend."""

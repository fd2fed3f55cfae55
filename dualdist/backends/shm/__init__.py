"""Shared-memory transport of the native backend."""

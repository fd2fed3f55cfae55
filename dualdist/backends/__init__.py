"""Backends, which move tensors between ranks; registry.py finds them by name."""

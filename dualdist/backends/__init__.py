"""Backends, which move tensors between ranks.

To add one, implement the Backend of base.py and register a BackendSpec: see registry.py.
"""

"""Reduce gradients during backward(): bucketing, compression, sparse gradients, Adasum, checks and join."""

"""Reduce gradients during backward(): bucketing, compression, sparse gradients, Adasum, checks and join.

The path of a gradient: optimizer.py attaches a Reducer to an optimizer. parameters.py registers its parameters, which
layout.py divides into buckets (reduction_plan.py keeps that also for ranks that have joined). packer.py copies each
gradient into its bucket; reducer.py reduces the buckets (bucket.py, or a strategy's) in an order that is the same on
all ranks, and makes the results the gradients.
"""

"""Benchmarks: programs that run in the ranks, the jobs that start them, and the evaluation of their reports."""

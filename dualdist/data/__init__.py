"""Sampling and loading of data sets on several ranks."""

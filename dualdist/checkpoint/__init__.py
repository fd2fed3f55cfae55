"""The state of a job, saved and loaded by all ranks together."""

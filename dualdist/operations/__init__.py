"""The operations on all ranks that a training script calls."""

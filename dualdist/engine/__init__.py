"""The engine: one ordered queue of operations for each communicator, and one place that waits for them."""

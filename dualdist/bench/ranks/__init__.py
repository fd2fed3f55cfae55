"""Programs that run inside the ranks of a measurement."""

"""DUALDIST_TIMELINE: what all ranks did, as one Chrome trace; the same on every backend."""

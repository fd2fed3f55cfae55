"""How gradients are reduced while backward() runs: planned, gathered in buckets, sent off, given back."""

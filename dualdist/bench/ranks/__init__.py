"""Programs that the ranks of a benchmark run; only these modules import torch."""

"""Backend over torch.distributed."""

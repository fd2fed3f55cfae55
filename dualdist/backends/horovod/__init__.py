"""Backend over Horovod."""

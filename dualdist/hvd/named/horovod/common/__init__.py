"""`horovod.common` under the alias."""

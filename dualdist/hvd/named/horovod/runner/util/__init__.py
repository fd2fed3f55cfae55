"""`horovod.runner.util` under the alias."""

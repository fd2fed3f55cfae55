"""Backend over mpi4py."""

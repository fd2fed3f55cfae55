"""Limits of a host that the native backend needs: shared memory and open files of each rank."""

# Shared memory that operations, gradients and a few groups need, per rank of the host.
SHM_BYTES_PER_RANK = 4 << 20
# Gloo connects every pair of ranks several times: for torch, for operations, for gradients, and for a group.
GLOO_MESHES = 4
SPARE_FILES = 512


def needed_open_files(size: int) -> int:
    """Return how many files a rank may have open at once in a job of `size` ranks."""
    return GLOO_MESHES * size + SPARE_FILES

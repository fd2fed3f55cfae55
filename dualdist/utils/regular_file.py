"""Opening of regular files only: the open of a pipe would block, and a device may have no end."""

import os
import stat


def open_regular(path: str, flags: int) -> int:
    """Open a regular file, as the opener of open(); raise OSError for anything else."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(None, "it is not a regular file")

"""torchrun's error file: a rank's uncaught error, written as torch's @record does, for torchrun's summary.

Of the ranks that failed, the summary names the one with the earliest time, in whole seconds, as the root cause.
"""

import json
import os
import time
from collections.abc import Mapping

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return True if torchrun has named a file, and nobody, such as @record, has written an error to it."""
    path = environ.get(ERROR_FILE, "")
    return path != "" and not os.path.exists(path)


def write_error(environ: Mapping[str, str], message: str, callstack: str) -> None:
    """Write an error to the file, if it is wanted."""
    if not is_wanted(environ):
        return
    path = environ[ERROR_FILE]
    more = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": more}}, file)
        os.replace(draft, path)  # whole, as torchrun may end this process meanwhile
    except OSError:  # the error is on stderr, too
        return

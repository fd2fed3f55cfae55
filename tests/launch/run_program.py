"""One rank of a job of `dualdist run`, without torch: prints its topology, then ends as HOW says.

python run_program.py [HOW [RANK]]
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dualdist.environments import detect

HOLD_S = 600


def fail(how: str) -> None:
    if how == "raise":
        try:
            raise KeyError("what it was about")
        except KeyError as error:
            raise ValueError("the first real reason") from error
    if how == "exit":
        sys.exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":  # a process that knows nothing of the job's end, in a session of its own
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HOLD_S})"], start_new_session=True)
        sys.exit(3)


def main(how: str = "", whose: str = "1", folder: str = "") -> None:
    place = detect(os.environ)
    print(f"out {place.rank}/{place.size} {place.launcher} threads={os.environ['OMP_NUM_THREADS']}")
    print(f"err {place.rank}", file=sys.stderr)
    if how == "stdin":
        print(sys.stdin.read())
    if how in ("", "stdin"):
        return
    if how == "once":
        marker = Path(folder, f"rank-{place.rank}")
        if not marker.exists():
            marker.touch()
            how = "raise"
        else:
            print("second time")
            return
    if place.rank == int(whose):
        fail(how)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a rank that hangs in C
    Path(folder or ".", f"up-{place.rank}").touch()
    time.sleep(HOLD_S)


if __name__ == "__main__":
    main(*sys.argv[1:])

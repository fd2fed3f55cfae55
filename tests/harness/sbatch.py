"""Submit a batch script, wait and exit with its exit code; `sbatch --wait` polls every ten seconds only.

python sbatch.py ARGUMENTS_OF_SBATCH...
"""

import re
import subprocess
import sys
import time

POLL_S = 0.1
UNDER_WAY = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}


def main(arguments: list[str]) -> int:
    job = _printed("sbatch", "--parsable", *arguments).strip()
    while True:
        record = _printed("scontrol", "--oneliner", "show", "job", job)
        state, code = re.search(r"JobState=(\w+)", record), re.search(r" ExitCode=(\d+):", record)
        if state is None or code is None:
            raise RuntimeError(f"no state and exit code of job {job} in {record!r}")
        if state[1] not in UNDER_WAY:
            return 0 if state[1] == "COMPLETED" else int(code[1]) or 1
        time.sleep(POLL_S)


def _printed(*argv: str) -> str:
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

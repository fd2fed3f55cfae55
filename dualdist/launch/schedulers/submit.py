"""The edge to the scheduler: hands it the text of a job, and returns what it said."""

from __future__ import annotations

import shlex
import shutil
import subprocess

from dualdist.errors import LaunchError, UsageError
from dualdist.launch.schedulers import find

TIMEOUT_S = 120.0
ELSEWHERE = "log in to a host of the cluster, or take the text there by --write FILE"


def submit(name: str, text: str) -> str:
    """What the scheduler printed when it took the job; LaunchError where it refused."""
    argv = find(name).submit
    if argv is None:
        raise UsageError(f"--submit with the scheduler {name}: there is none to submit to; --write FILE, and run that")
    if shutil.which(argv[0]) is None:
        raise LaunchError(f"{argv[0]} was not found on PATH: {ELSEWHERE}")
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shlex.join(argv)} took no job: {error}") from error
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip() or "nothing"
        raise LaunchError(f"{shlex.join(argv)} refused the job with exit code {done.returncode}, and said: {said}")
    return done.stdout + done.stderr

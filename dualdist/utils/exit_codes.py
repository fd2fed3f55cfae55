"""How a job is told to stop, and how it tells that it has and can go on: what ranks, launchers and scripts share."""

from __future__ import annotations

import signal

# The exit code of a job that stopped because it was told to, and can go on: EX_TEMPFAIL of sysexits.h, "try again".
REQUEUE = 75
# What tells a rank to stop: what schedulers send before they take a machine away, and what Slurm is asked to send.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A file whose appearance tells the job to stop; rank 0 and `dualdist run` look for it.
NOTICE = "DUALDIST_NOTICE"
# Beside that file: rank 0 says that the job has stopped. Some launchers lose the exit code.
DONE = ".done"

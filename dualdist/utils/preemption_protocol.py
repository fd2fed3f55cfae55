"""Preemption protocol: the signals, file and exit status that ranks, launchers and job scripts share."""

import signal

# Exit status of a preempted job that can be requeued: EX_TEMPFAIL of sysexits.h, "try again".
REQUEUE = 75
# Signals that preempt a rank: sent by schedulers before they reclaim a machine, and by Slurm on request.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Names a file whose creation preempts the job; rank 0 and `dualdist run` poll for it.
NOTICE = "DUALDIST_NOTICE"
# Suffix of a file that rank 0 creates once the job has stopped, since some launchers lose the exit status.
DONE = ".done"

"""The part of a job script that tells the ranks to stop in time, and has the job queued again when they have.

The script is told itself, or looks at the clock. It makes a file, which rank 0 looks for: no launcher needs to pass a
signal on. When the ranks have saved and stopped rank 0 makes another one beside it: no launcher needs to keep the exit
code. A job that a person cancels makes neither, and is not queued again.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualdist.launch.schedulers.request import Request
from dualdist.utils.exit_codes import DONE, NOTICE, REQUEUE

SIGNAL = "USR1"
FILE = f'"${NOTICE}"'
DONE_FILE = f'"${NOTICE}{DONE}"'
# Until the job ends, or a signal comes, or the clock has to be looked at.
BY_SIGNAL = ['    wait "$!" || true']
BY_CLOCK = ["    sleep 1", f'    [ "$SECONDS" -lt "$notice_after" ] || touch {FILE}']
END = f"exit {REQUEUE}"


def around(
    request: Request, body: Sequence[str], folder: str, job: str, again: str, *, by_clock: bool = False
) -> list[str]:
    """The body of a script, run so that it can be told to stop, where that was requested; else as it is.

    `folder` is one that all nodes share, `job` names the job in it, and `again` is the command that queues the job
    again, or ends the script so that somebody does. With `by_clock` no signal comes: $notice_after says when to stop.
    """
    if request.requeue is None:
        return list(body)
    return [
        "# The ranks look for this file, save when it is there, and stop; then there is a second one beside it.",
        f'{NOTICE}="{folder}/.dualdist-stop-{job}"',
        f'variables+=("{NOTICE}=${NOTICE}")',
        f"rm -f {FILE} {DONE_FILE}",
        *([] if by_clock else [f"trap 'touch {FILE}' {SIGNAL}"]),
        "job() {",
        *(f"    {line}" for line in body),
        "}",
        "job &",
        'while kill -0 "$!" 2> /dev/null; do',
        *(BY_CLOCK if by_clock else BY_SIGNAL),
        "done",
        "code=0",
        'wait "$!" || code=$?',
        f'ls "{folder}" > /dev/null # so that NFS looks again',
        "stopped=",
        f"if [ -e {FILE} ] && [ -e {DONE_FILE} ]; then stopped=yes; fi",
        f"rm -f {FILE} {DONE_FILE}",
        f'if [ -n "$stopped" ]; then {again}; fi',
        'exit "$code"',
    ]

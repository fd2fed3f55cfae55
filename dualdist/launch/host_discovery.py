"""The hosts of an elastic job that come and go: a script prints the current ones, as for horovodrun.

Each line of its output is a line of a host file: `a:2`, or `a slots=2`. It is run again a second after it has ended.
A host that cannot take part is left out, with one line that says why, and tried again after RETRY_S.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

from dualdist.errors import LaunchError, UsageError
from dualdist.launch.hosts import parse_host_lines
from dualdist.launch.job import Host

PAUSE_S = 1.0
SCRIPT_S = 30.0
RETRY_S = 30.0


class HostDiscovery:
    """The script, the hosts that it named last, and the thread that runs it.

    Args:
        script: the path of a program without arguments.
        check: raises LaunchError if a host cannot take part.
    """

    def __init__(self, script: str, check: Callable[[Host], object]) -> None:
        self.hosts: tuple[Host, ...] = ()  # those that can take part
        self._script = script
        self._check = check
        self._taking_part: set[str] = set()  # the names of hosts that passed the check
        self._retry_at: dict[str, float] = {}
        self._complaint = ""

    def wait_for(self, slots: int, timeout_s: float) -> None:
        """Run the script until hosts have so many slots, or for `timeout_s`.

        Raises:
            LaunchError: the script cannot be run, fails, or prints something else.
        """
        deadline = time.monotonic() + timeout_s
        self.hosts = self._find()
        while sum(host.slots for host in self.hosts) < slots:
            if time.monotonic() > deadline:
                return
            time.sleep(PAUSE_S)
            self._refresh()

    def start(self) -> None:
        """Run the script again and again, in a thread, until this process ends."""
        threading.Thread(target=self._follow, name="dualdist-host-discovery", daemon=True).start()

    def _follow(self) -> None:
        while True:
            time.sleep(PAUSE_S)
            self._refresh()

    def _refresh(self) -> None:
        """Find the hosts; those of before stay where the script fails, as a scheduler may be away for a moment."""
        try:
            self.hosts = self._find()
        except LaunchError as error:
            self._complain(f"{error}; the hosts stay as they are")

    def _find(self) -> tuple[Host, ...]:
        try:
            done = subprocess.run(
                [self._script], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SCRIPT_S, check=False
            )
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise LaunchError(f"{self._script} failed with exit code {done.returncode} ({why})")
            named = parse_host_lines(done.stdout, self._script)
        except (OSError, UnicodeDecodeError, UsageError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"--host-discovery-script {self._script}: {error}") from error
        self._taking_part &= {host.name for host in named}
        self.hosts = tuple(host for host in named if host.name in self._taking_part)  # a check may take long
        return tuple(host for host in named if self._can_take_part(host))

    def _can_take_part(self, host: Host) -> bool:
        """Return True if the host has passed the check since it was named first."""
        if host.name in self._taking_part:
            return True
        if time.monotonic() < self._retry_at.get(host.name, 0.0):
            return False
        try:
            self._check(host)
        except (LaunchError, OSError) as error:
            self._retry_at[host.name] = time.monotonic() + RETRY_S
            self._complain(f"{error}; it is left out, and tried again every {RETRY_S:g} s")
            return False
        self._taking_part.add(host.name)
        return True

    def _complain(self, text: str) -> None:
        """Say what is wrong, once in a row."""
        if text != self._complaint:
            print(f"dualdist run: {text}", file=sys.stderr)
        self._complaint = text

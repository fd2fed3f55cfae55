"""A slow network on one machine, for `--slow-link 100mbit` of `compare` and `bench`: half of the ranks are behind it.

    python -m dualdist.bench.slow_link RATE [COMMAND COMMAND]

makes two network namespaces, joined by a virtual cable that carries RATE in each direction (tc-tbf), and runs each of
the commands, JSON lists of words, in one of them. The namespaces have no names: each lives as long as a process in it,
and the first of these ends with this program. Without commands it only tries whether that works.
"""

import json
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from dualdist.errors import LaunchError, UsageError
from dualdist.launch.job import Command, Host, Job, RendezvousAddress, Site
from dualdist.launch.launchers import build_commands

RATE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?[kmg]bit")
BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
LAUNCHER = "torchrun"  # the only launcher whose agent can be started at each end without ssh
ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = 29400  # free, as in a new namespace all are
DEVICES = ("ddlink0", "ddlink1")
# Bytes that may leave at once, and how long a packet waits before it is dropped.
LIMITS = ("burst", "128kb", "latency", "200ms")
START_S, GRACE_S = 10.0, 30.0


def require_slow_link(rate: str, site: Site) -> None:
    """Raise UsageError unless this machine can make such a link."""
    if RATE.fullmatch(rate) is None:
        raise UsageError(f"--slow-link {rate}: expected a rate, as 100mbit, 1gbit or 512kbit")
    if not site.is_root:
        raise UsageError("--slow-link makes network namespaces, which needs root: run this as root, or in a container")
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise UsageError(f"--slow-link needs the program {program}: install {package}")
    tried = subprocess.run([*_argv(site, rate)], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise UsageError(f"--slow-link {rate} does not work here: {(tried.stdout + tried.stderr).strip()}")


def link_bytes_s(rate: str) -> float:
    """Return how many bytes a link of this rate carries in a second, in each direction."""
    return float(rate[: -len("mbit")]) * BITS[rate[-len("mbit")]] / 8


def wrap_in_slow_link(job: Job, site: Site, rate: str) -> Command:
    """Return the command that runs the job under torchrun, the second half of its ranks behind the link."""
    first = (job.ranks + 1) // 2
    hosts = (Host(ADDRESSES[0], first, is_local=True), Host(ADDRESSES[1], job.ranks - first, is_local=True))
    site = replace(site, rendezvous=RendezvousAddress(ADDRESSES[0], PORT))
    commands = build_commands(LAUNCHER, replace(job, hosts=hosts), site)
    return Command(_argv(site, rate, *(json.dumps(command.argv) for command in commands)), commands[0].env)


def _argv(site: Site, *words: str) -> tuple[str, ...]:
    return (site.python, "-m", "dualdist.bench.slow_link", *words)


@contextmanager
def slow_link(rate: str) -> Iterator[list[list[str]]]:
    """Yield for each end of a link the words that run a command there."""
    with ExitStack() as stack:
        pids = [_start_namespace(stack) for _ in ADDRESSES]
        ends = [[str(shutil.which("nsenter")), "--target", str(pid), "--net", "--"] for pid in pids]
        cable = [(device, "netns", str(pid)) for device, pid in zip(DEVICES, pids, strict=True)]
        _run("ip", "link", "add", *cable[0], "type", "veth", "peer", *cable[1])
        for end, device, address in zip(ends, DEVICES, ADDRESSES, strict=True):
            _run(*end, "ip", "addr", "add", f"{address}/30", "dev", device)
            _run(*end, "ip", "link", "set", "lo", "up")
            _run(*end, "ip", "link", "set", device, "up")
            _run(*end, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *LIMITS)
        yield ends


def _start_namespace(stack: ExitStack) -> int:
    """Start a process in a new network namespace, which ends when its standard input does; return its id."""
    argv = ["unshare", "--net", "sh", "-c", "echo && exec cat"]
    holder = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert holder.stdin is not None
    assert holder.stdout is not None
    stack.callback(holder.stdin.close)
    if not select.select([holder.stdout], [], [], START_S)[0] or not holder.stdout.readline():
        raise LaunchError("unshare --net made no network namespace")
    return holder.pid


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaunchError(f"{' '.join(argv)}: {done.stderr.strip()}")


def main(rate: str, commands: Sequence[str]) -> int:
    """Run the commands, one at each end of the link; return the exit code of the first that failed."""
    with slow_link(rate) as ends, ExitStack() as stack:
        running = [
            stack.enter_context(subprocess.Popen([*end, *json.loads(command)], stdin=subprocess.DEVNULL))
            for end, command in zip(ends, commands, strict=False)
        ]
        codes = []
        for process, other in zip(running, reversed(running), strict=True):
            while process.poll() is None and not other.poll():
                _wait(process, 0.5)
            if not _wait(process, GRACE_S):  # the other one has failed
                process.terminate()
            codes.append(process.wait())
        return next((code for code in codes if code), 0)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    return process.returncode is not None


if __name__ == "__main__":
    try:
        code = main(sys.argv[1], sys.argv[2:])
    except LaunchError as error:
        code = 1
        print(error, file=sys.stderr)
    sys.exit(abs(code))

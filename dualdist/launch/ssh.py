"""ssh: the command lines that run something on another host, and the meaning of its errors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from dualdist.launch.control_channel import CONTROL_VARIABLE
from dualdist.launch.job import Command, Site
from dualdist.utils.redaction import is_secret

# Never ask for a password. A host that is silent for 20 s is lost.
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
NO_STDIN = "-n"  # else ssh forwards the terminal's input to a rank
GUARD = ("-m", "dualdist.launch.remote_guard")
ENV_FROM_STDIN = "--env-from-stdin"  # an option of the guard
PROBE = ("-m", "dualdist.launch.host_probe")
# Exit codes of the remote shell before python runs, and ssh's own.
NO_FOLDER, NO_PYTHON, SSH_FAILED = 71, 72, 255
FAILURES = (
    (("Permission denied",), "it requires a password: put your public key there by `ssh-copy-id {host}`"),
    (("Could not resolve hostname", "Name or service not known"), "its name does not resolve: is it spelled right?"),
    (
        ("Host key verification", "HOST IDENTIFICATION HAS CHANGED"),
        "its key is unknown: run `ssh {host}` and compare it",
    ),
    (("Connection refused",), "it runs no ssh server on that port"),
    (
        ("timed out", "No route to", "unreachable", "Connection closed"),
        "it does not answer: is it up, the address right?",
    ),
)


def wrap_in_ssh(command: Command, site: Site, *, control_port: int | None = None) -> Command:
    """Return the local command that runs the given one on its host, under a guard.

    ssh forwards `control_port` of that host to this one. All users of both hosts see command lines: secrets go to the
    guard's standard input.
    """
    if command.host is None:
        return command
    private = {name: value for name, value in command.env.items() if name == CONTROL_VARIABLE or is_secret(name)}
    public = {name: value for name, value in command.env.items() if name not in private}
    guarded = (site.python, *GUARD, *[ENV_FROM_STDIN] * bool(private), *command.argv)
    forward = ("-R", f"127.0.0.1:{control_port}:127.0.0.1:{control_port}") if control_port is not None else ()
    line = f"cd {shlex.quote(site.folder)} && exec {shlex.join([*_env(public), *guarded])}"
    argv = ("ssh", *[NO_STDIN] * (not private), *OPTIONS, *forward, command.host, line)
    return Command(argv, stdin=json.dumps(private) if private else "")


def probe_argv(host: str, site: Site, env: Mapping[str, str], target: Sequence[str]) -> list[str]:
    """Return the argv that runs host_probe.py on a host."""
    ssh, *words = remote_python_argv(host, site, env, (*PROBE, *target))
    return [ssh, NO_STDIN, *words]


def remote_python_argv(host: str, site: Site, env: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the argv that runs python with these arguments on a host; it exits by the codes above if it cannot."""
    folder, python = shlex.quote(site.folder), shlex.quote(site.python)
    checks = f"cd {folder} || exit {NO_FOLDER}; test -x {python} || exit {NO_PYTHON}; "
    public = {name: value for name, value in env.items() if not is_secret(name)}
    line = shlex.join([*_env(public), site.python, *words])
    return ["ssh", *OPTIONS, host, shlex.join(["sh", "-c", f"{checks}exec {line}"])]


def describe_ssh_failure(host: str, code: int, stderr: str, site: Site) -> str:
    """Return why a host cannot take part, from the exit code and stderr of its probe."""
    last_line = (stderr.strip().splitlines() or [f"exit code {code}"])[-1]
    if code == NO_FOLDER:
        return f"host {host!r} has no folder {site.folder}: start the job in one that every host has"
    if code == NO_PYTHON:
        return f"host {host!r} has no {site.python}: every host needs the same environment at the same path"
    if code == SSH_FAILED:
        for words, meaning in FAILURES:
            if any(word in stderr for word in words):
                return f"host {host!r} cannot be reached by ssh: {meaning.format(host=host)} ({last_line})"
        return f"host {host!r} cannot be reached by ssh ({last_line})"
    if "No module named" in stderr:
        return f"host {host!r}: {site.python} does not find dualdist there ({last_line}): install it on every host"
    return f"host {host!r} cannot run {site.python} ({last_line})"


def _env(env: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in env.items())] if env else []

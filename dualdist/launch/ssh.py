"""ssh's command lines, and what its failures mean."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from dualdist.launch.control_channel import CONTROL_VARIABLE
from dualdist.launch.job import Command, Site
from dualdist.utils.redaction import is_secret

# Never ask for a password: nobody may be there to type it. A host that is silent for 20 s has been lost.
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
NO_STDIN = "-n"  # else what a person types goes to a rank
GUARD = ("-m", "dualdist.launch.remote_guard")
ENV_FROM_STDIN = "--told"  # before the keeper's command: it hears of more variables on its standard input
PROBE = ("-m", "dualdist.launch.host_probe")
# Exit codes of the remote side before python runs; ssh's own is 255, a missing command's 127.
NO_FOLDER, NO_PYTHON, NO_PACKAGE, SSH_FAILED = 71, 72, 1, 255
FAILURES = (
    (
        ("Permission denied",),
        "it lets nobody in without a password: put your public key there by `ssh-copy-id {host}`",
    ),
    (("Could not resolve hostname", "Name or service not known"), "its name does not resolve: is it spelled right?"),
    (
        ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
        "its key is not known here: say `ssh {host}` once and compare it",
    ),
    (("Connection refused",), "it runs no ssh server on that port"),
    (
        ("timed out", "No route to host", "Network is unreachable", "Connection closed"),
        "it does not answer: is it up, and the address right?",
    ),
)


def wrap_in_ssh(command: Command, site: Site, *, link_port: int | None = None) -> Command:
    """The command here that runs the given one on its host, to which `link_port` of this one becomes its own.

    Everybody on both hosts sees the words of a command: the keeper hears by its standard input what is secret.
    """
    if command.host is None:
        return command
    told = {name: value for name, value in command.env.items() if name == CONTROL_VARIABLE or is_secret(name)}
    shown = {name: value for name, value in command.env.items() if name not in told}
    inner = (site.python, *GUARD, *[ENV_FROM_STDIN] * bool(told), *command.argv)
    back = ("-R", f"127.0.0.1:{link_port}:127.0.0.1:{link_port}") if link_port is not None else ()
    words = (
        "ssh",
        *[NO_STDIN] * (not told),
        *OPTIONS,
        *back,
        command.host,
        remote_command_line(inner, shown, site.folder),
    )
    return Command(words, stdin=json.dumps(told) if told else "")


def probe_argv(host: str, site: Site, env: Mapping[str, str], target: Sequence[str]) -> list[str]:
    """The argv that has a host tell of itself; exits by one of the codes above where it cannot."""
    ssh, *words = remote_python_argv(host, site, env, (*PROBE, *target))
    return [ssh, NO_STDIN, *words]


def remote_python_argv(host: str, site: Site, env: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """The argv that has a host's python run what these words say, and gives it our standard input."""
    checks = (
        f"cd {shlex.quote(site.folder)} || exit {NO_FOLDER}; test -x {shlex.quote(site.python)} || exit {NO_PYTHON}; "
    )
    known = {name: value for name, value in env.items() if not is_secret(name)}  # nobody needs them to tell of a host
    line = shlex.join([*_env(known), site.python, *words])
    return ["ssh", *OPTIONS, host, shlex.join(["sh", "-c", f"{checks}exec {line}"])]


def remote_command_line(argv: Sequence[str], env: Mapping[str, str], folder: str) -> str:
    """One line for the shell that ssh starts there."""
    return f"cd {shlex.quote(folder)} && exec {shlex.join([*_env(env), *argv])}"


def describe_ssh_failure(host: str, code: int, stderr: str, site: Site) -> str:
    """Why a host cannot take part, from how its probe ended."""
    said = stderr.strip().splitlines()[-1:] or [f"exit code {code}"]
    if code == NO_FOLDER:
        return f"host {host!r} has no folder {site.folder}: start the job in one that every host has"
    if code == NO_PYTHON:
        return f"host {host!r} has no {site.python}: every host needs the same environment at the same place"
    if code == SSH_FAILED:
        for words, meaning in FAILURES:
            if any(word in stderr for word in words):
                return f"host {host!r} cannot be reached by ssh: {meaning.format(host=host)} ({said[0]})"
        return f"host {host!r} cannot be reached by ssh ({said[0]})"
    if "No module named" in stderr:
        return f"host {host!r}: {site.python} does not find dualdist there ({said[0]}): install it on every host"
    return f"host {host!r} cannot run {site.python} ({said[0]})"


def _env(env: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in env.items())] if env else []

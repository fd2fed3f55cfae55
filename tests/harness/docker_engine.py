"""Docker engine for tests: the running one, or one that is started and removed again."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.jobs import Job

PROGRAMS = ("dockerd", "containerd", "runc", "unshare")
PACKAGES = "docker.io docker-compose debootstrap"
START_S = 60.0
STOP_S = 30.0
POLL_S = 0.1
# No default network and no firewall rules: tests create what they need.
OPTIONS = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--log-level=warn")


class NoEngineError(Exception):
    """Raised if no engine runs and none can be started; the message has the reason and the command to type."""


@dataclass(frozen=True)
class Engine:
    """A running engine; `env` is for docker and docker-compose, `is_ours` if the tests started it."""

    is_ours: bool
    env: Mapping[str, str] = field(repr=False)


def client(path: str) -> str | None:
    return shutil.which("docker", path=path)


@contextmanager
def engine(directory: Path, env: Mapping[str, str]) -> Iterator[Engine]:
    """Yield the running engine, or start one in the directory; raise NoEngineError."""
    docker = client(env["PATH"])
    if docker is None:
        raise NoEngineError(f"docker not found: apt-get install --no-install-recommends {PACKAGES}")
    if _answers(docker, env):
        yield Engine(is_ours=False, env=env)
        return
    if missing := [name for name in PROGRAMS if shutil.which(name, path=env["PATH"]) is None]:
        raise NoEngineError(
            f"no Docker engine runs, and to start one {', '.join(missing)} is missing: "
            f"apt-get install --no-install-recommends {PACKAGES}"
        )
    if os.geteuid() != 0:
        raise NoEngineError("no Docker engine runs that this user may use, and only root can start one")
    with _started(directory, docker, env) as ours:
        yield ours


@contextmanager
def _started(directory: Path, docker: str, env: Mapping[str, str]) -> Iterator[Engine]:
    """Start the engine in a mount namespace, which removes its mounts when it ends."""
    env = {**env, "DOCKER_HOST": f"unix://{directory}/socket"}
    folders = [f"--data-root={directory}/data", f"--exec-root={directory}/exec", f"--pidfile={directory}/pid"]
    argv = ["unshare", "--mount", "dockerd", f"--host={env['DOCKER_HOST']}", *folders, *OPTIONS]
    with Job(argv, env=env, cwd=directory, grace_s=STOP_S) as daemon:
        deadline = time.monotonic() + START_S
        while not _answers(docker, env):
            if not daemon.is_running() or time.monotonic() > deadline:
                raise NoEngineError(f"dockerd does not start here: {_last_words(daemon)}")
            time.sleep(POLL_S)
        try:
            yield Engine(is_ours=True, env=env)
        finally:
            _stop(docker, env, directory, daemon)
    shutil.rmtree(directory, ignore_errors=True)


def _stop(docker: str, env: Mapping[str, str], directory: Path, daemon: Job) -> None:
    """Remove networks, which would outlive the engine, and stop it; Job kills the rest."""
    subprocess.run([docker, "network", "prune", "--force"], env=dict(env), capture_output=True, check=False)
    subprocess.run(["kill", (directory / "pid").read_text()], check=False)
    daemon.wait(STOP_S)


def _answers(docker: str, env: Mapping[str, str]) -> bool:
    argv = [docker, "version", "--format", "{{.Server.Version}}"]
    done = subprocess.run(argv, env=dict(env), capture_output=True, timeout=START_S, check=False)
    return done.returncode == 0


def _last_words(daemon: Job) -> str:
    lines = [line for line in daemon.output().splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "failed" in line or "level=fatal" in line), "".join(lines[-1:]))

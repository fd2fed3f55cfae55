"""Docker for tests: an engine, the image of docker/Dockerfile, and a base image for machines without a registry."""

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.base_env import ROOT
from harness.jobs import Job, Launch, Outcome

PROGRAMS = ("dockerd", "containerd", "runc", "unshare")
PACKAGES = "docker.io docker-compose debootstrap"
START_S = 60.0
STOP_S = 30.0
POLL_S = 0.1
# No default network and no firewall rules: tests create what they need.
OPTIONS = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--log-level=warn")
RELEASE = "bookworm"
BASE_IMAGE = f"dualdist-test-base:{RELEASE}"
IMAGE = "dualdist-test"
BUILD_S = 3000.0
"""For a full build on busy cores; Horovod takes up to ten minutes of it."""
# As in Debian's images. Without it dpkg syncs the disk after each file of each package.
DPKG_OPTIONS = "force-unsafe-io\n"
# As there too. Without it apt fetches translated descriptions of all packages.
APT_OPTIONS = 'Acquire::Languages "none";\n'
RUN_S = 400.0
"""For a comparison of three contenders in a container on busy cores; 40 s on idle ones."""


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


@dataclass(frozen=True)
class Image:
    """An image in the engine; containers get `network`, which has no route to the outside."""

    name: str
    launch: Launch
    network: str

    def argv(self, *argv: str, options: Sequence[str] = ()) -> list[str]:
        """Return the user's command with the test's options."""
        return ["docker", "run", "--rm", f"--network={self.network}", *options, self.name, *argv]

    def run(self, *argv: str, options: Sequence[str] = (), check: bool = True) -> Outcome:
        return self.launch(self.argv(*argv, options=options), check=check, timeout_s=RUN_S)


def build_image(launch: Launch, base: str | None) -> None:
    """Build the image on `base`, or on docker/Dockerfile's base."""
    arguments = ["--file", str(ROOT / "docker" / "Dockerfile"), "--tag", IMAGE]
    if base is not None:
        arguments += ["--build-arg", f"BASE={base}", "--build-arg", "TORCH_INDEX=", "--network", "host"]
    launch(["docker", "build", *arguments, str(ROOT)], timeout_s=BUILD_S)


def make_base(launch: Launch, wheels: Path | None) -> str:
    """Make a Debian image by debootstrap with this machine's pip configuration, and return its name.

    `wheels` is a cache of install-horovod that is copied into it.
    """
    root = launch.directory / "base"
    launch(["debootstrap", "--variant=minbase", RELEASE, str(root)], timeout_s=BUILD_S)
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / folder)
        (root / folder / "partial").mkdir(parents=True)
    (root / "etc" / "dpkg" / "dpkg.cfg.d" / "unsafe-io").write_text(DPKG_OPTIONS)
    (root / "etc" / "apt" / "apt.conf.d" / "no-languages").write_text(APT_OPTIONS)
    _configure_pip(root)
    if wheels is not None and wheels.is_dir():
        shutil.copytree(wheels, root / "root" / ".cache" / "dualdist" / "wheels")
    launch(["sh", "-c", 'tar -C "$0" -c . | docker import - "$1"', str(root), BASE_IMAGE], timeout_s=BUILD_S)
    shutil.rmtree(root)
    return BASE_IMAGE


def _configure_pip(root: Path) -> None:
    """Copy this machine's certificates and package folders for pip into the base."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    settings = {}
    for line in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = ast.literal_eval(value)
    lines = ["[global]"]
    if "cert" in settings:
        shutil.copyfile(settings["cert"], root / "etc" / "pip-cert.pem")
        lines.append("cert = /etc/pip-cert.pem")
    if "index-url" in settings:
        lines.append(f"index-url = {settings['index-url']}")
    folders = [Path(each) for each in settings.get("find-links", "").split() if Path(each).is_dir()]
    for folder in folders:
        shutil.copytree(folder, root / folder.relative_to("/"), dirs_exist_ok=True)
    if folders:
        lines.append(f"find-links = {' '.join(map(str, folders))}")
    (root / "etc" / "pip.conf").write_text("\n".join([*lines, ""]))

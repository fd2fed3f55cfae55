"""Image of docker/Dockerfile for tests, and a base image for machines without a registry."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base_env import ROOT
from harness.jobs import Launch, Outcome

RELEASE = "bookworm"
BASE = f"dualdist-test-base:{RELEASE}"
NAME = "dualdist-test"
LIMIT_S = 3000.0
"""For a full build on busy cores; Horovod takes up to ten minutes of it."""
# As in Debian's images. Without it dpkg syncs the disk after each file of each package.
DPKG_OPTIONS = "force-unsafe-io\n"
# As there too. Without it apt fetches translated descriptions of all packages.
APT_OPTIONS = 'Acquire::Languages "none";\n'
RUN_S = 400.0
"""For a comparison of three contenders in a container on busy cores; 40 s on idle ones."""


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


def build(launch: Launch, base: str | None) -> None:
    """Build the image on `base`, or on docker/Dockerfile's base."""
    arguments = ["--file", str(ROOT / "docker" / "Dockerfile"), "--tag", NAME]
    if base is not None:
        arguments += ["--build-arg", f"BASE={base}", "--build-arg", "TORCH_INDEX=", "--network", "host"]
    launch(["docker", "build", *arguments, str(ROOT)], timeout_s=LIMIT_S)


def make_base(launch: Launch, wheels: Path | None) -> str:
    """Make a Debian image by debootstrap with this machine's pip configuration, and return its name.

    `wheels` is a cache of install-horovod that is copied into it.
    """
    root = launch.directory / "base"
    launch(["debootstrap", "--variant=minbase", RELEASE, str(root)], timeout_s=LIMIT_S)
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / folder)
        (root / folder / "partial").mkdir(parents=True)
    (root / "etc" / "dpkg" / "dpkg.cfg.d" / "unsafe-io").write_text(DPKG_OPTIONS)
    (root / "etc" / "apt" / "apt.conf.d" / "no-languages").write_text(APT_OPTIONS)
    _configure_pip(root)
    if wheels is not None and wheels.is_dir():
        shutil.copytree(wheels, root / "root" / ".cache" / "dualdist" / "wheels")
    launch(["sh", "-c", 'tar -C "$0" -c . | docker import - "$1"', str(root), BASE], timeout_s=LIMIT_S)
    shutil.rmtree(root)
    return BASE


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

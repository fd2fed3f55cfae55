"""docker/compose.yaml: two hosts on a Docker network, which reach each other by ssh."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from harness.base_env import ROOT
from harness.docker import Image
from harness.installed import lack
from harness.jobs import Launch, Outcome
from harness.slurm import eventually
from launch.running import commands

pytestmark = pytest.mark.timeout(3600)

FILE = ROOT / "docker" / "compose.yaml"
UP_S = 60.0
# Appended to the README's lines, so that training takes seconds.
SHORT = ("--model=mlp", "--epochs=4", "--max-steps=4", "--summary=/job/summary.json")
TYPED = "docker compose -f docker/compose.yaml exec hosta"
LINES = [words[len(TYPED.split()) :] for words in commands(ROOT / "docker" / "README.md", TYPED)]
UNASKED = ("-o", "BatchMode=yes")


@dataclass(frozen=True)
class Compose:
    """Running hosts; `compose` is the command and its options."""

    launch: Launch
    compose: tuple[str, ...]

    def __call__(self, *argv: str, check: bool = True) -> Outcome:
        return self.launch([*self.compose, *argv], check=check)

    def on(self, host: str, *argv: str, check: bool = True) -> Outcome:
        return self("exec", "-T", host, *argv, check=check)

    def ssh(self, host: str, other: str, *options: str, check: bool = True) -> Outcome:
        return self.on(host, "ssh", *options, other, "true", check=check)


@pytest.fixture(scope="module")
def hosts(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    env = {**image.launch.env, "DUALDIST_IMAGE": image.name}
    launch = Launch(env, tmp_path_factory.mktemp("compose"))
    plugin = launch(["docker", "compose", "version"], check=False).rc == 0
    if not plugin and shutil.which("docker-compose", path=env["PATH"]) is None:
        lack("docker compose", "docker-compose")
    words = ("docker", "compose") if plugin else ("docker-compose",)
    both = Compose(launch, (*words, "--file", str(FILE), "--project-name", f"dualdist-test-{os.getpid()}"))
    both("up", "--detach")
    try:
        pairs = (("hosta", "hostb"), ("hostb", "hosta"))
        up = eventually(lambda: all(both.ssh(*pair, check=False).rc == 0 for pair in pairs), within_s=UP_S)
        assert up, both("logs").stdout
        yield both
    finally:
        both("down", "--volumes", "--timeout", "1")


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_a_line_of_the_readme_trains_on_both(hosts: Compose, line: list[str]) -> None:
    outcome = hosts.on("hosta", *line, *SHORT)
    summary = json.loads(hosts.on("hosta", "cat", "/job/summary.json").stdout)
    launcher = line[line.index("--launcher") + 1] if "--launcher" in line else line[0]
    backend = "native" if launcher == "torchrun" else "horovod"
    assert (summary["launcher"], summary["backend"]) == (launcher, backend), str(outcome)
    assert (summary["ranks"], summary["nodes"]) == (2, 2), str(outcome)


@pytest.mark.smoke
def test_all_launchers_are_among_the_lines() -> None:
    assert [line[0] for line in LINES] == ["mpirun", "horovodrun", "dualdist"]


def test_ssh_needs_the_shared_keys(hosts: Compose) -> None:
    """A client without the key is refused, whatever its password; a server without it is not trusted."""
    keyless = ("-F", "none", "-p", "2222", "-o", "StrictHostKeyChecking=no")
    refused = hosts.ssh("hosta", "hostb", *keyless, *UNASKED, check=False)
    assert "Permission denied (publickey)" in refused.stderr
    unknown = hosts.ssh("hosta", "hostb", *UNASKED, "-o", "UserKnownHostsFile=none", check=False)
    assert "Host key verification failed" in unknown.stderr

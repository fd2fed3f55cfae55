"""The script that finds the hosts of an elastic job: what it may print, and what happens when it fails."""

from pathlib import Path

import pytest

from dualdist.errors import LaunchError
from dualdist.launch import host_discovery
from dualdist.launch.host_discovery import HostDiscovery
from dualdist.launch.job import Host


def script(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def refuse_b(host: Host) -> None:
    if host.name == "b":
        raise LaunchError("host 'b' cannot be reached")


def test_a_host_that_cannot_take_part_is_left_out_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_discovery, "PAUSE_S", 0.0)
    discovery = HostDiscovery(script(tmp_path / "hosts", "echo a:2; echo b; echo c slots=3"), refuse_b)
    discovery.wait_for(6, timeout_s=0.2)
    assert discovery.hosts == (Host("a", 2), Host("c", 3))
    assert capsys.readouterr().err.count("host 'b' cannot be reached; it is left out") == 1


def test_hosts_stay_as_they_are_while_the_script_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_discovery, "PAUSE_S", 0.0)
    once = f"[ ! -e {tmp_path}/done ] || {{ echo no scheduler >&2; exit 3; }}; touch {tmp_path}/done; echo a:2"
    discovery = HostDiscovery(script(tmp_path / "hosts", once), refuse_b)
    discovery.wait_for(3, timeout_s=0.2)
    assert discovery.hosts == (Host("a", 2),)
    assert "failed with exit code 3 (no scheduler); the hosts stay as they are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("exit 4", "failed with exit code 4 (no message)"),
        ("echo 'a b c'", "hosts:1: expected a host and its slots"),
        (None, "No such file"),
    ],
)
def test_a_script_that_fails_at_once_is_an_error(tmp_path: Path, lines: str | None, expected: str) -> None:
    path = tmp_path / "hosts"
    discovery = HostDiscovery(str(path) if lines is None else script(path, lines), refuse_b)
    with pytest.raises(LaunchError, match="hosts") as caught:
        discovery.wait_for(1, timeout_s=1.0)
    assert expected in str(caught.value)

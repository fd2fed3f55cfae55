"""Hosts: parsing, probing, and errors of unusable ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualdist.errors import LaunchError, UsageError
from dualdist.launch import hosts, ssh
from dualdist.launch.hosts import ProbedHost, evaluate_hosts, is_local_host, probe_host
from dualdist.launch.job import Host, Site
from dualdist.version import __version__

SITE = Site("/v/bin/python", {}, "/v/bin", folder="/shared/job")
HERE = ProbedHost("a", 8, {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1"}, 4711, "", "", __version__)
THERE = ProbedHost("b", 4, {"lo": "127.0.0.1", "eth0": "10.0.0.2"}, 4712, "10.0.0.1", "10.0.0.2", __version__)
A, B = Host("a", 2, is_local=True), Host("b", 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a:2,b:1", [("a", 2), ("b", 1)]),
        ("a, b", [("a", 1), ("b", 1)]),
        ("a,b,a", [("a", 2), ("b", 1)]),
        ("10.0.0.1:16", [("10.0.0.1", 16)]),
        ("node-1.site.example:2", [("node-1.site.example", 2)]),
        ("[fd00::1]:2,[fd00::2]", [("fd00::1", 2), ("fd00::2", 1)]),
    ],
)
def test_hosts_of_a_line(text: str, found: list[tuple[str, int]]) -> None:
    assert hosts.parse_hosts(text) == tuple(Host(*each) for each in found)


@pytest.mark.parametrize(
    "text",
    [
        "a slots=2\nb slots=1\n",
        "# ours\na slots=2 max-slots=4\n\nb   # one\n",
        "a:2\nb:1\n",
        "a\na\nb\n",
        "a slots = 2\nb\n",
        "b\na\n",
    ],
    ids=["open mpi", "comments", "mpich", "a scheduler's", "spaces", "order"],
)
def test_hosts_of_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    expected = (Host("b", 1), Host("a", 1)) if text.startswith("b") else (Host("a", 2), Host("b", 1))
    assert hosts.read_hostfile(tmp_path / "hosts") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "it names no host"), ("a slots=2\nb two\n", "hosts:2: expected a host"), ("a slots=0", "expected 1 or more")],
)
def test_malformed_host_files_are_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=message):
        hosts.read_hostfile(tmp_path / "hosts")
    with pytest.raises(UsageError, match="cannot read this host file: No such file"):
        hosts.read_hostfile(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text", ["", "a:2,", "a:x", "a:0", "-oProxyCommand=x:1", "a:2:3", "a b", "fd00::1:2", "[fd00::1"]
)
def test_malformed_lists_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        hosts.parse_hosts(text)
    assert [is_local_host(name) for name in ("localhost", "127.0.0.1")] == [True, True]
    assert [is_local_host(name) for name in ("192.0.2.1", "no such name")] == [False, False]  # RFC 5737: unassigned


def test_ranks_meet_where_the_first_host_is_seen_by_the_others() -> None:
    for interface in (None, "eth0"):
        found = evaluate_hosts([A, B], interface, HERE, lambda names, target: [THERE])
        assert (found.rendezvous.address, found.rendezvous.port) == ("10.0.0.1", 4711)
        assert found.cores == (8, 4)
    assert evaluate_hosts([A, B], None, HERE, lambda names, target: [THERE]).local_addresses == ("10.0.0.1", "10.1.0.1")


@pytest.mark.parametrize(
    ("interface", "changes", "message"),
    [
        ("eth1", {}, r"host 'b' has no network interface 'eth1' .* it has lo .*, eth0 \(10\.0\.0\.2\)"),
        ("eth0", {"unreachable": {"10.0.0.1": "no answer"}},
         r"host 'b' cannot reach host 'a' at 10\.0\.0\.1 \(interface eth0\): no answer; a has"),
        (None, {"version": "0.0"}, rf"host 'b' has dualdist 0\.0, and this one {__version__}"),
    ],
)  # fmt: skip
def test_a_host_that_cannot_take_part_is_named_with_the_reason(
    interface: str | None, changes: Any, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        evaluate_hosts([A, B], interface, HERE, lambda names, target: [replace(THERE, **changes)])


def test_ranks_meet_where_ssh_reached_the_first_host_and_the_others_try_that() -> None:
    calls: list[tuple[Sequence[str], Sequence[str]]] = []

    def ask(names: Sequence[str], target: Sequence[str]) -> list[ProbedHost]:
        calls.append((names, target))
        return [THERE] * len(names)

    found = evaluate_hosts([B, Host("c", 1)], None, HERE, ask)
    assert found.rendezvous.address == "10.0.0.2"
    assert calls == [(["b"], ()), (["c"], ("4712", "10.0.0.2"))]


def test_networks_that_do_not_connect_the_hosts_are_left_out() -> None:
    def networks(**changes: Any) -> tuple[str, ...]:
        return evaluate_hosts([A, B], None, HERE, lambda names, target: [replace(THERE, **changes)]).networks

    both = {"eth0": "10.0.0.2", "eth1": "10.1.0.2"}
    assert networks() == ("eth0",)  # the other host has no eth1
    assert networks(interfaces=both) == ()  # nothing has to be left out
    assert networks(interfaces=both, unreachable={"10.1.0.1": "no answer"}) == ("eth0",)
    assert networks(interfaces={"ens3": "10.0.0.2"}) == ()  # no name is known on both
    here = probe_host(9, ["127.0.0.1"])
    assert here.unreachable == {"127.0.0.1": "this host has the same address"}


@pytest.mark.parametrize(
    ("code", "stderr", "message"),
    [
        (71, "", "host 'b' has no folder /shared/job: start the job in one that every host has"),
        (72, "", "host 'b' has no /v/bin/python: every host needs the same environment at the same path"),
        (1, "/v/bin/python: No module named dualdist.launch.launchers\n", "/v/bin/python does not find dualdist there"),
        (1, "ImportError: libx.so\n", "host 'b' cannot run /v/bin/python (ImportError: libx.so)"),
        (255, "root@b: Permission denied (publickey,password).\n", "requires a password: put your public"),
        (255, "ssh: Could not resolve hostname b: Name or service not known\n", "its name does not resolve"),
        (255, "ssh: connect to host b port 22: Connection refused\n", "it runs no ssh server on that port"),
        (255, "ssh: connect to host b port 22: Connection timed out\n", "it does not answer"),
        (255, "Host key verification failed.\n", "its key is unknown: run `ssh b`"),
        (255, "", "host 'b' cannot be reached by ssh (exit code 255)"),
    ],
)  # fmt: skip
def test_an_unusable_host_is_reported_with_the_reason(code: int, stderr: str, message: str) -> None:
    assert message in ssh.describe_ssh_failure("b", code, stderr, SITE)

"""Findings about several hosts, by tables of their reports."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from doctor_facts import HOST, VERSIONS

from dualdist.doctor.checks.hosts import HostReport, find
from dualdist.doctor.hosts import connect, drop_own_addresses, parse_greeting, strip_user
from dualdist.errors import LaunchError
from dualdist.launch.job import Site
from dualdist.launch.ssh import HostPeer
from dualdist.utils.deadline import Deadline
from dualdist.version import __version__

GOOD = replace(HOST, versions=VERSIONS)


def report(name: str = "a", *, at: str = "10.0.0.1", **changes: Any) -> HostReport:
    names = {field.name for field in fields(HostReport)}
    own = {key: value for key, value in changes.items() if key in names}
    host_changes = {key: value for key, value in changes.items() if key not in names}
    facts = replace(GOOD, name=name, address=at, interfaces={"lo": "127.0.0.1", "eth0": at}, **host_changes)
    return HostReport(**{"name": name, "facts": facts, **own})


def connections(
    *bad: tuple[str, int], why: str = "no answer; is the address right?", other: str = ""
) -> dict[str, Any]:
    targets = [("10.0.0.2", 40000), ("10.0.0.2", 29500), *([(other, 40000), (other, 29500)] if other else [])]
    return {"b": {target: why if target in bad else "" for target in targets}}


HERE, THERE = ("10.0.0.2", 40000), ("10.0.0.2", 29500)
OTHER: Any = {"dualdist": "0", "torch": "2.12.0"}
TABLE = [
    ("two equal hosts", [report(connections=connections()), report("b", at="10.0.0.2")], {}),
    ("one that does not answer", [report(), HostReport("b", problem="host 'b' cannot be reached by ssh: ...")],
     {"host-unusable": "error"}),
    ("a firewall", [report(connections=connections(HERE, THERE)), report("b")], {"hosts-cut-off": "error"}),
    ("a firewalled port", [report(connections=connections(THERE)), report("b")], {"port-blocked": "warning"}),
    ("a network that is not shared", [report(connections=connections(("10.9.0.2", 40000),
     ("10.9.0.2", 29500), other="10.9.0.2"))],
     {"networks-not-shared": "warning"}),
    ("a host without a network", [report(connections={"b": {}})], {"no-network": "error"}),
    ("an unknown name", [report(resolved={"b": ""})], {"host-name-unknown": "error"}),
    ("a name that is loopback", [report(resolved={"b": "127.0.1.1"})], {"host-name-is-loopback": "error"}),
    ("hosts named by addresses", [report(resolved={"10.0.0.2": ""})], {}),
    ("a host name that is loopback", [report(at="10.0.0.1", facts=replace(GOOD, address="127.0.1.1")), report("b")],
     {"hostname-is-loopback": "warning"}),
    ("a clock ahead", [report(), report("b", skew_s=5.0, skew_error_s=0.1)], {"clock-skew": "warning"}),
    ("a skew within its error", [report(), report("b", skew_s=5.0, skew_error_s=4.5)], {}),
    ("another dualdist", [report(), report("b", versions={**VERSIONS, "dualdist": "0"})], {"versions-differ": "error"}),
    ("another torch", [report(), report("b", versions={**VERSIONS, "torch": "2.12.0"})],
     {"versions-differ": "warning"}),
    ("no torch", [report(), report("b", versions={**VERSIONS, "torch": None})], {"versions-differ": "error"}),
    ("little shared memory there", [report(), report("b", slots=4, shm_free=7 << 20)], {"shm-too-small": "warning"}),
    ("few files for the job's connections", [report(slots=2, shm_free=96 << 20, open_files=(600, 600)),
     report("b", slots=100)], {"too-few-files": "warning"}),
]  # fmt: skip


DOCKER0 = ("172.17.0.1", 29500)
REFUSED = "connection refused"


def test_connections_to_own_addresses_are_dropped() -> None:
    """Every host has docker0's address, and connects to itself there."""
    blocked = "no answer; is the address right?"
    for found in (REFUSED, ""):  # the second where its own program listens on that port
        assert drop_own_addresses({HERE: "", DOCKER0: found}, ["10.0.0.1", DOCKER0[0]]) == {HERE: ""}
    assert drop_own_addresses({HERE: blocked, DOCKER0: REFUSED}, ["10.0.0.1", DOCKER0[0]]) == {HERE: blocked}
    assert drop_own_addresses({DOCKER0: REFUSED}, [DOCKER0[0]]) == {DOCKER0: "this host has the same address"}
    assert drop_own_addresses({DOCKER0: ""}, [DOCKER0[0]]) == {DOCKER0: ""}, "two names for one host"
    assert drop_own_addresses({}, [DOCKER0[0]]) == {}
    assert [strip_user(name) for name in ("me@b", "b", "me@10.0.0.2")] == ["b", "b", "10.0.0.2"]


def test_a_peer_listens_until_its_input_ends(base_env: Mapping[str, str]) -> None:
    argv = [sys.executable, "-m", "dualdist.doctor.hosts"]
    with subprocess.Popen(argv, env=dict(base_env), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        message = json.loads(running.stdout.readline())
        address = ("127.0.0.1", message["ports"][0])
        assert [connect(*address) for _ in range(10)] == [""] * 10
        running.communicate(timeout=60)
    assert connect(*address).startswith("connection refused")


@pytest.mark.parametrize(
    "program",
    ["sleep 60 & wait", "exec >&-; sleep 60", "echo welcome; sleep 60", "printf {; sleep 60", "yes"],
    ids=["its child holds the pipes", "it closes its output", "it prints", "it sends half a message", "it never stops"],
)
@pytest.mark.parametrize("request_bytes", [0, 1 << 20], ids=["reading", "writing"])
def test_a_host_that_stalls_is_an_error_in_time(program: str, request_bytes: int) -> None:
    pipe, request = subprocess.PIPE, {"request": "x" * request_bytes} if request_bytes else None
    site = Site("python", {}, path="")
    with subprocess.Popen(["sh", "-c", program], stdin=pipe, stdout=pipe, start_new_session=True) as running:
        peer = HostPeer("b", running, io.BytesIO(), site)
        try:
            with pytest.raises(LaunchError, match=r"host 'b' did not report its facts within 0\.3 s"):
                peer.exchange("report its facts", Deadline(0.3), request)
        finally:
            os.killpg(running.pid, signal.SIGKILL)


GREETING = {"facts": asdict(GOOD), "ports": [40000]}


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({"facts": {**asdict(GOOD), "hypervisor": "kvm"}}, "1"),
        ({"facts": {name: value for name, value in asdict(GOOD).items() if name != "open_files"}}, "1"),
        ({}, None),
        ({"facts": {"name": "a"}}, "of an unknown version"),
    ],
)
def test_a_greeting_of_another_dualdist_is_an_error(changes: dict[str, Any], version: str | None) -> None:
    message = json.loads(json.dumps({**GREETING, **changes}))
    if version is None:
        assert parse_greeting("a", message)[0] == GOOD
        return
    with pytest.raises(
        LaunchError, match=rf"host 'a' has dualdist {version}, but this host has {__version__}: install"
    ):
        parse_greeting("a", message)


@pytest.mark.parametrize(("hosts", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_host_problems_have_a_name_and_a_level(hosts: list[HostReport], expected: dict[str, str]) -> None:
    assert {each.name: each.level for each in find(hosts)} == expected


def test_findings_name_the_host_and_the_error() -> None:
    (finding,) = find([report(), report("b", skew_s=-5.0, skew_error_s=0.1)])
    assert "host b is 5.0 s behind" in finding.message
    (finding,) = find([report(), report("b", shm_free=0)])
    assert finding.message.startswith("host b: /dev/shm has 0 MiB free")
    (finding,) = find([report(), report("b", versions={**VERSIONS, "torch": None})])
    assert "torch differs: a has 2.13.0+cpu, b has none" in finding.message

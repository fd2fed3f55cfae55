"""The doctor's findings about several hosts: tables of what they said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from doctor_facts import HOST, VERSIONS

from dualdist.doctor import peer
from dualdist.doctor.checks.hosts import HostReport, find
from dualdist.doctor.facts import HostFacts
from dualdist.doctor.hosts import address_of, known, told_by
from dualdist.doctor.smoke_test import last_words
from dualdist.errors import LaunchError
from dualdist.version import __version__

GOOD = replace(HOST, versions=VERSIONS)


def host(name: str = "a", *, at: str = "10.0.0.1", **changes: Any) -> HostReport:
    fields = {"name", "slots", "problem", "host", "skew_s", "skew_error_s", "reached", "names"}
    about = {key: value for key, value in changes.items() if key not in fields}
    mine = replace(GOOD, name=name, address=at, interfaces={"lo": "127.0.0.1", "eth0": at}, **about)
    return HostReport(**{"name": name, "host": mine, **{k: v for k, v in changes.items() if k in fields}})


def calls(*bad: tuple[str, int], why: str = "no answer; is the address right?", other: str = "") -> dict[str, Any]:
    targets = [("10.0.0.2", 40000), ("10.0.0.2", 29500), *([(other, 40000), (other, 29500)] if other else [])]
    return {"b": {target: why if target in bad else "" for target in targets}}


HERE, THERE = ("10.0.0.2", 40000), ("10.0.0.2", 29500)
OTHER: Any = {"dualdist": "0", "torch": "2.12.0"}
TABLE = [
    ("two that are alike", [host(reached=calls()), host("b", at="10.0.0.2")], {}),
    ("one that does not answer", [host(), HostReport("b", problem="host 'b' cannot be reached by ssh: ...")],
     {"host-unusable": "error"}),
    ("a firewall", [host(reached=calls(HERE, THERE)), host("b")], {"hosts-cut-off": "error"}),
    ("a firewalled port", [host(reached=calls(THERE)), host("b")], {"port-blocked": "warning"}),
    ("a network that is not shared", [host(reached=calls(("10.9.0.2", 40000), ("10.9.0.2", 29500), other="10.9.0.2"))],
     {"networks-not-shared": "warning"}),
    ("a host without a network", [host(reached={"b": {}})], {"no-network": "error"}),
    ("a name that is not known", [host(names={"b": ""})], {"host-name-unknown": "error"}),
    ("a name that is loopback", [host(names={"b": "127.0.1.1"})], {"host-name-is-loopback": "error"}),
    ("hosts named by addresses", [host(names={"10.0.0.2": ""})], {}),
    ("an own name that is loopback", [host(at="10.0.0.1", host=replace(GOOD, address="127.0.1.1")), host("b")],
     {"hostname-is-loopback": "warning"}),
    ("a clock ahead", [host(), host("b", skew_s=5.0, skew_error_s=0.1)], {"clock-skew": "warning"}),
    ("a clock behind", [host(), host("b", skew_s=-5.0, skew_error_s=0.1)], {"clock-skew": "warning"}),
    ("a clock that cannot be told from ours", [host(), host("b", skew_s=5.0, skew_error_s=4.5)], {}),
    ("another dualdist", [host(), host("b", versions={**VERSIONS, "dualdist": "0"})], {"versions-differ": "error"}),
    ("another torch", [host(), host("b", versions={**VERSIONS, "torch": "2.12.0"})], {"versions-differ": "warning"}),
    ("no torch", [host(), host("b", versions={**VERSIONS, "torch": None})], {"versions-differ": "error"}),
    ("little shared memory there", [host(), host("b", slots=4, shm_free=64 << 20)], {"shm-too-small": "warning"}),
    ("few files there", [host(), host("b", files=(99, 99))], {"too-few-files": "warning"}),
]  # fmt: skip


DOCKER0 = ("172.17.0.1", 29500)
STRANGE = "another program answers; is the address that of another host, too?"


def test_an_address_of_the_callers_own_tells_nothing_of_another_host() -> None:
    """Every host has docker0's: who calls it reaches itself, whatever stands between the hosts."""
    blocked = "no answer; is the address right?"
    assert told_by({HERE: "", DOCKER0: STRANGE}, ["10.0.0.1", DOCKER0[0]]) == {HERE: ""}
    assert told_by({HERE: blocked, DOCKER0: STRANGE}, ["10.0.0.1", DOCKER0[0]]) == {HERE: blocked}
    assert told_by({DOCKER0: STRANGE}, [DOCKER0[0]]) == {DOCKER0: "this host has the same address"}
    assert told_by({DOCKER0: ""}, [DOCKER0[0]]) == {DOCKER0: ""}, "two names of one host"
    assert told_by({}, [DOCKER0[0]]) == {}


def test_a_host_is_known_by_its_greeting(base_env: Mapping[str, str]) -> None:
    argv = [sys.executable, "-m", "dualdist.doctor.peer"]
    with subprocess.Popen(argv, env=dict(base_env), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        said = json.loads(running.stdout.readline())
        at = ("127.0.0.1", said["ports"][0])
        assert (peer.call(at, said["nonce"]), peer.call(at, "0" * len(said["nonce"]))) == ("", STRANGE)
        running.communicate(timeout=60)


FIRST_WORDS = {"host": asdict(GOOD), "ports": [40000], "nonce": "a"}


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ({"host": {**asdict(GOOD), "hypervisor": "kvm"}}, "1"),
        ({"host": {name: value for name, value in asdict(GOOD).items() if name != "files"}}, "1"),
        ({"nonce": None}, None),
        ({"host": {"name": "a"}}, "of an unknown version"),
    ],
)
def test_a_host_with_another_dualdist_is_named(said: dict[str, Any], version: str | None) -> None:
    """It tells other things of itself, or fewer."""
    words = json.loads(json.dumps({**FIRST_WORDS, **said}))
    if version is None:
        assert known("a", words)[0] == GOOD
        return
    with pytest.raises(LaunchError, match=rf"host 'a' has dualdist {version}, and this one {__version__}: install"):
        known("a", words)


def test_a_user_for_ssh_is_no_part_of_a_hosts_name() -> None:
    assert [address_of(name) for name in ("me@b", "b", "me@10.0.0.2")] == ["b", "b", "10.0.0.2"]


@pytest.mark.parametrize(("hosts", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_hosts_are_judged_by_what_they_said(hosts: list[HostReport], expected: dict[str, str]) -> None:
    assert {each.name: each.level for each in find(hosts)} == expected


def test_the_last_words_of_a_job_are_an_exceptions_own() -> None:
    head = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'
    after = "-" * 40 + "\nPrimary job terminated normally, but 1 process returned\n" + "-" * 40
    assert last_words(f"{head}dualdist.errors.TopologyError: two ranks\n{after}") == (
        "dualdist.errors.TopologyError: two ranks"
    )
    assert last_words("bash: no such program\n-----\n") == "bash: no such program"
    assert last_words("\n---\n") == ""


def test_findings_name_the_host_and_the_reason() -> None:
    (told,) = find([host(reached=calls(THERE)), host("b")])
    assert "host a reaches b, but not its port 29500 (no answer" in told.seen
    (told,) = find([host(reached=calls(HERE, THERE)), host("b")])
    assert "host a cannot open a connection to b (10.0.0.2 port 40000): no answer" in told.seen
    (told,) = find([host(), host("b", skew_s=-5.0, skew_error_s=0.1)])
    assert "host b is 5.0 s behind" in told.seen
    (told,) = find([host(), host("b", shm_free=0)])
    assert told.seen.startswith("host b: /dev/shm has 0 MiB free")
    (told,) = find([host(), host("b", versions={**VERSIONS, "torch": None})])
    assert "torch differs: a has 2.13.0+cpu, b has none" in told.seen


def test_limits_count_the_ranks_of_each_host_and_connections_those_of_the_job() -> None:
    ranks = [host(slots=2, shm_free=96 << 20, files=(600, 600)), host("b", slots=100)]
    assert {each.name for each in find(ranks)} == {"too-few-files"}
    assert isinstance(ranks[0].host, HostFacts)

"""Two hosts, network namespaces with addresses of their own, and three ranks that train across them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import problem
from harness.installed import lack
from harness.jobs import REPORT_DIR, Launch, collect

PROGRAM = Path(problem.__file__).with_name("tiny_rank.py")
ADDRESSES = ("10.231.77.1", "10.231.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces that reach each other, each by one interface beside loopback."""
    if shutil.which("ip") is None:
        lack("ip", "iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = [f"dd{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"{names[0]}v", "type", "veth", "peer", "name", f"{names[1]}v")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("link", "set", f"{name}v", "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{name}v")
            ip("-n", name, "link", "set", f"{name}v", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.parametrize("meeting", ["an address", "a file"])
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_ranks_of_two_hosts_train_together(launch: Launch, hosts: list[str], backend: str, meeting: str) -> None:
    """Two ranks on the first host, one on the second; the host name resolves to loopback on both."""
    folder = launch.directory / "reports"
    folder.mkdir()
    given = {
        "an address": {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"},
        "a file": {"DUALDIST_RENDEZVOUS": (launch.directory / "meet").as_uri()},
    }[meeting]
    with ExitStack() as stack:
        jobs = []
        for rank, host, local_rank, local_size in ((0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 1)):
            env = {
                "DUALDIST_RANK": str(rank),
                "DUALDIST_SIZE": "3",
                "DUALDIST_LOCAL_RANK": str(local_rank),
                "DUALDIST_LOCAL_SIZE": str(local_size),
                REPORT_DIR: str(folder),
                **given,
            }
            argv = ["ip", "netns", "exec", hosts[host], sys.executable, str(PROGRAM), backend]
            jobs.append(stack.enter_context(launch.start(argv, env=env)))
        outcomes = [job.wait(100) for job in jobs]
    failed = next(itertools.chain((o for o in outcomes if o.rc), outcomes))
    reports = collect(folder, 3, failed)
    assert [(seen["node"], seen["local_rank"], seen["nodes"]) for seen in reports] == [(0, 0, 2), (0, 1, 2), (1, 0, 2)]
    assert {seen["sum"][0] for seen in reports} == {7}
    assert reports[0]["parameters"] == pytest.approx(problem.trained_by_one_process(3), rel=1e-6, abs=1e-6)

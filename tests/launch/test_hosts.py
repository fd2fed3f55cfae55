"""Two hosts, network namespaces with addresses of their own, and three ranks that train across them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import problem
from harness.installed import lack
from harness.jobs import REPORT_DIR, Launch, collect

PROGRAM = Path(problem.__file__).with_name("tiny_rank.py")
ADDRESSES = ("10.231.77.1", "10.231.77.2")
# Of three ranks, both on the first host end with their batches before the other one.
JOINING = """
import torch
import dualdist as dd
from harness.jobs import report

class Own:
    def compress(self, tensor):
        return tensor.clone(), None

    def decompress(self, tensor, ctx):
        return tensor

dd.init("native", timeout_s=20)
weight = torch.nn.Parameter(torch.zeros(100_000))
optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), compression=Own())
for _ in range(2 + 2 * (dd.rank() == 2)):
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
last = dd.join()
dd.broadcast_(weight.data, last)
report(dd.rank(), {"transport": dd.transport(), "last": last, "weight": weight.detach().unique().tolist()})
"""


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
    given = {
        "an address": {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"},
        "a file": {"DUALDIST_RENDEZVOUS": (launch.directory / "meet").as_uri()},
    }[meeting]
    reports = run_of_three(launch, hosts, given, str(PROGRAM), backend)
    assert [(seen["node_rank"], seen["local_rank"], seen["num_nodes"]) for seen in reports] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
    ]
    assert {seen["sum"][0] for seen in reports} == {7}
    assert reports[0]["parameters"] == pytest.approx(problem.trained_by_one_process(3), rel=1e-6, abs=1e-6)


def test_a_host_whose_ranks_have_all_joined_sees_what_the_others_begin(launch: Launch, hosts: list[str]) -> None:
    """Also where a compressor of one's own makes what is too large for Gloo's way of few values."""
    given = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
    reports = run_of_three(launch, hosts, given, "-c", JOINING)
    assert [(seen["transport"], seen["last"]) for seen in reports] == [("shm", 2)] * 3
    for seen in reports:
        assert seen["weight"] == [pytest.approx(-(1 + 1 + 1 / 3 + 1 / 3))]


def run_of_three(launch: Launch, hosts: list[str], given: Mapping[str, str], *words: str) -> list[dict[str, Any]]:
    """What ranks report, of which two are on the first host; words follow `python`."""
    folder = launch.directory / "reports"
    folder.mkdir()
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
            argv = ["ip", "netns", "exec", hosts[host], sys.executable, *words]
            jobs.append(stack.enter_context(launch.start(argv, env=env)))
        outcomes = [job.wait(100) for job in jobs]
    failed = next(itertools.chain((o for o in outcomes if o.rc), outcomes))
    return collect(folder, 3, failed)

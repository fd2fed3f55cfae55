"""Three ranks on two hosts, started without a launcher: two on the first host, one on the second."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from harness.hosts import ADDRESSES, Hosts
from harness.jobs import Launch
from launch.running import TINY_RANK, check, collected, rank_env, side_by_side

# Both ranks of the first host end with their batches before the other one.
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


@pytest.fixture
def hosts(two_hosts: Hosts) -> Iterator[Hosts]:
    """Two hosts with one interface each beside loopback."""
    for space in two_hosts.spaces:
        two_hosts.ip(space, "link", "set", "eth1", "down")
    yield two_hosts
    for space in two_hosts.spaces:
        two_hosts.ip(space, "link", "set", "eth1", "up")


def run_of_three(launch: Launch, hosts: Hosts, given: Mapping[str, str], *words: str) -> list[dict[str, Any]]:
    """Return the reports of `python WORDS` on three ranks, where the host name resolves to loopback on both hosts."""
    names = launch.directory / "hosts"
    names.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
    script = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(names), sys.executable, *words)
    places = ((0, rank_env(0, 3, 0, 2)), (0, rank_env(1, 3, 1, 2)), (1, rank_env(2, 3)))
    commands = [(["ip", "netns", "exec", hosts.spaces[host], *script], {**env, **given}) for host, env in places]
    return collected(launch, 3, lambda env: side_by_side(launch, [(argv, {**own, **env}) for argv, own in commands]))


@pytest.mark.parametrize("rendezvous", ["an address", "a file"])
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_ranks_of_two_hosts_train_together(launch: Launch, hosts: Hosts, backend: str, rendezvous: str) -> None:
    given = {
        "an address": {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"},
        "a file": {"DUALDIST_RENDEZVOUS": (launch.directory / "meet").as_uri()},
    }[rendezvous]
    check(run_of_three(launch, hosts, given, TINY_RANK, backend), (2, 1), backend=backend)


def test_a_host_whose_ranks_have_all_joined_takes_part_in_collectives_of_the_others(
    launch: Launch, hosts: Hosts
) -> None:
    """Also where a custom compressor's messages are too large for Gloo's path for few values."""
    given = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
    for seen in run_of_three(launch, hosts, given, "-c", JOINING):
        assert (seen["transport"], seen["last"]) == ("shm", 2)
        assert seen["weight"] == [pytest.approx(-(1 + 1 + 1 / 3 + 1 / 3))]

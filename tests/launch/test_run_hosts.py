"""Two hosts, by `dualdist run -H` or without a launcher: which ranks train, how jobs end, and what is refused."""

import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from harness import mpi
from harness.hosts import ADDRESSES, APART, Hosts
from harness.jobs import REPORT_DIR, Launch, Outcome
from harness.slurm import eventually
from launch.running import (
    PROGRAM,
    RUN,
    TINY_RANK,
    check,
    collected,
    last_words,
    lines,
    rank_env,
    run_with_mpich,
    side_by_side,
    stand_in,
    start,
    wait_for,
)

LAUNCHERS = ("torchrun", "horovodrun", "mpirun", "spawn")
C10D = ("torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=17")


def outcome_of(launch: Launch, two_hosts: Hosts, *words: str, host: int = 0) -> Outcome:
    return launch(two_hosts.on(host, *RUN, *words), env=two_hosts.env, check=False)


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [("torchrun", "native"), ("horovodrun", "horovod"), ("mpirun", "horovod"), ("mpirun", "mpi")],
)
def test_ranks_of_two_hosts_train(launch: Launch, two_hosts: Hosts, launcher: str, backend: str) -> None:
    """By the interface that both share; each has another one, by which they cannot reach each other.

    mpirun, which would use both, is given no name: `dualdist run` finds the interface.
    """
    words = ["-H", "hosta:2,hostb:1", "--launcher", launcher, "--backend", backend]
    words += [] if launcher == "mpirun" else ["--network-interface", "eth0"]

    def run(env: Mapping[str, str]) -> Outcome:
        return outcome_of(launch, two_hosts, *words, "--env", f"{REPORT_DIR}={env[REPORT_DIR]}", TINY_RANK, backend)

    check(collected(launch, 3, run), (2, 1), backend=backend)


@pytest.mark.parametrize("launcher", [*LAUNCHERS, "horovodrun-mpi"])
def test_output_lines_are_tagged_by_rank_and_host(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    launch.write("hosts", "hosta slots=2\nhostb slots=1  # the small one\n")
    words = ["--launcher", launcher, "--hostfile", "hosts", "--tag-output", PROGRAM]
    outcome = outcome_of(launch, two_hosts, *words)
    name = launcher.removesuffix("-mpi")
    places = enumerate(("hosta", "hosta", "hostb"))
    assert lines(outcome.stdout) == [f"[{rank} {host}] out {rank}/3 {name} threads=1" for rank, host in places], outcome


LOOKING = """
import os, pathlib
secret, seen = os.environ["HF_TOKEN"].encode(), []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words = path.read_bytes()
    except OSError:
        continue
    if secret in words or b"DUALDIST_RUN=" in words:
        seen.append(words)
print("out", os.environ["RANK"], seen)
"""


def test_no_command_line_shows_a_secret(launch: Launch, two_hosts: Hosts) -> None:
    """Ranks here and there see all command lines of both."""
    launch.write("looking.py", LOOKING)
    words = ["-H", "hosta:1,hostb:1", "--launcher", "torchrun", "--env", "HF_TOKEN", "looking.py"]
    outcome = launch(two_hosts.on(0, *RUN, *words), env={**two_hosts.env, "HF_TOKEN": "hush-5ecret"})
    assert lines(outcome.stdout) == ["out 0 []", "out 1 []"], str(outcome)


def test_mpich_starts_ranks_on_hosts(launch: Launch, two_hosts: Hosts, mpich: mpi.MPICH) -> None:
    run, env = run_with_mpich(launch, mpich)
    words = ["-H", "hosta:2,hostb:1", "--network-interface", "eth0", "--env", "OMP_NUM_THREADS=2", PROGRAM]
    outcome = launch(two_hosts.on(0, *run, *words), env={**two_hosts.env, **env})
    places = enumerate(("hosta", "hosta", "hostb"))
    assert lines(outcome.stdout) == [f"[{rank} {host}] out {rank}/3 mpirun threads=2" for rank, host in places]


@pytest.mark.smoke("spawn")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_fails_on_another_host_is_named_with_it(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    """The others hang and ignore SIGTERM; two_hosts sees that none stays."""
    words = ["-H", "hosta:1,hostb:2", "--launcher", launcher, PROGRAM, "raise", "2", str(launch.directory)]
    outcome = outcome_of(launch, two_hosts, *words)
    assert outcome.rc == 1
    first, *rest = last_words(outcome.stderr)
    assert first == "dualdist run: rank 2 on hostb failed first (exit code 1):", str(outcome)
    assert rest[-1] == "ValueError: the first real reason"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_stays_on_other_hosts_when_run_is_killed(launch: Launch, two_hosts: Hosts, launcher: str) -> None:
    words = ["-H", "hosta:1,hostb:1", "--launcher", launcher, PROGRAM, "hang", "-1", str(launch.directory)]
    with start(launch, two_hosts.on(0, *RUN, *words), two_hosts.env) as job:
        wait_for(*(launch.directory / f"up-{rank}" for rank in range(2)))
        (run,) = [line for line in two_hosts.processes("-m dualdist run", PROGRAM) if "unshare" not in line]
        launch(["kill", "-KILL", run.split()[1]])
        assert eventually(lambda: not two_hosts.processes(PROGRAM), within_s=15)
        job.wait(30)


def test_a_lost_host_ends_its_jobs(launch: Launch, two_hosts: Hosts) -> None:
    """On both hosts: the lost host's processes end there, MPI's daemon with them."""
    with ExitStack() as stack:
        jobs = []
        for launcher in ("torchrun", "mpirun"):
            folder = launch.directory / launcher
            folder.mkdir()
            words = ["-H", "hosta:1,hostb:1", "--launcher", launcher, PROGRAM, "hang", "-1", str(folder)]
            jobs.append(stack.enter_context(start(launch, two_hosts.on(0, *RUN, *words), two_hosts.env)))
            wait_for(*(folder / f"up-{rank}" for rank in range(2)))
        try:
            two_hosts.cut_off(1)
            outcomes = [job.wait(60) for job in jobs]
            ended = eventually(lambda: not (two_hosts.processes(PROGRAM) or two_hosts.processes("orted")), within_s=30)
        finally:
            two_hosts.connect(1)
    assert ended
    for outcome in outcomes:
        assert not outcome.timed_out, str(outcome)
        assert outcome.rc not in (0, 124), str(outcome)
        assert "rank 1 on hostb was lost" in last_words(outcome.stderr)[0], str(outcome)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("-H", "hosta:1,nowhere:1"), "host 'nowhere' cannot be reached by ssh: its name does not resolve"),
        (("-H", "hosta:1,10.231.78.77:1"), "host '10.231.78.77' cannot be reached by ssh: it does not answer"),
        (("-H", "hosta:1,hostb:1", "--network-interface", "eth7"), "host 'hosta' has no network interface 'eth7'"),
        (
            ("-H", "hosta:1,hostb:1", "--network-interface", "eth1"),
            f"host 'hostb' cannot reach host 'hosta' at {APART[0]} (interface eth1): ",
        ),
        (("-H", "hosta:1,hostb:1", "-np", "3"), "3 ranks on hosts with 2 slots (hosta:1,hostb:1)"),
    ],
    ids=["unresolvable", "silent", "no interface", "the wrong network", "too few slots"],
)
def test_host_errors_are_reported_before_anything_starts(
    launch: Launch, two_hosts: Hosts, words: tuple[str, ...], error: str
) -> None:
    outcome = outcome_of(launch, two_hosts, *words, PROGRAM)
    assert outcome.rc == (2 if "slots" in error else 1)
    assert error in outcome.stderr, str(outcome)
    assert "Traceback" not in outcome.stderr
    assert lines(outcome.stdout) == []
    assert outcome.seconds < 20


def test_a_host_that_asks_for_a_password_is_named(launch: Launch, two_hosts: Hosts) -> None:
    """ssh has no key here, and must not ask."""
    options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o IdentityFile=none -o IdentitiesOnly=yes"
    env = {**two_hosts.env, **stand_in(launch, "ssh", f'#!/bin/sh\nexec /usr/bin/ssh -F none {options} "$@"\n')}
    outcome = launch(two_hosts.on(0, *RUN, "-H", "hostb:1", PROGRAM), env=env, check=False)
    assert "host 'hostb' cannot be reached by ssh: it requires a password" in outcome.stderr, str(outcome)


def test_hosts_need_the_same_folder(launch: Launch, two_hosts: Hosts) -> None:
    """A folder that only this host has: a mount in a namespace of the command's own."""
    hidden = launch.directory / "hidden"
    hidden.mkdir()
    script = f'mount -t tmpfs none {hidden} && mkdir {hidden}/here && cd {hidden}/here && touch x.py && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", *RUN, "-H", "hostb:1", "x.py"]
    outcome = launch(two_hosts.on(0, *argv), env=two_hosts.env, check=False)
    assert f"host 'hostb' has no folder {hidden}/here: start the job in one that every host has" in outcome.stderr


def test_torchrun_by_hand_meets_by_c10d(launch: Launch, two_hosts: Hosts) -> None:
    """Without `dualdist run`: an agent on each host, whose ranks train together."""
    endpoint = f"--rdzv-endpoint={ADDRESSES[0]}:29517"
    agents = [
        two_hosts.on(host, *C10D, endpoint, f"--local-addr={address}", f"--nproc-per-node={count}", TINY_RANK, "native")
        for host, (address, count) in enumerate(zip(ADDRESSES, (2, 1), strict=True))
    ]

    def run(env: Mapping[str, str]) -> list[Outcome]:
        return side_by_side(launch, [(agent, {**two_hosts.env, **env}) for agent in agents])

    check(collected(launch, 3, run), (2, 1), launcher="torchrun", backend="native")


@pytest.mark.parametrize("how", ["dualdist run", "torchrun"])
def test_hosts_without_ipv4_train(launch: Launch, ipv6_hosts: Hosts, how: str) -> None:
    first, second = ipv6_hosts.network.addresses

    def run(env: Mapping[str, str]) -> Outcome | list[Outcome]:
        if how == "torchrun":
            words = [*C10D, f"--rdzv-endpoint=[{first}]:29517", "--nproc-per-node=1", TINY_RANK, "native"]
            agents = [ipv6_hosts.on(host, *words) for host in range(2)]
            return side_by_side(launch, [(agent, {**ipv6_hosts.env, **env}) for agent in agents])
        reported = ("--env", f"{REPORT_DIR}={env[REPORT_DIR]}")
        return outcome_of(launch, ipv6_hosts, "-H", f"[{first}]:1,[{second}]:1", *reported, TINY_RANK, "native")

    check(collected(launch, 2, run), (1, 1), launcher="torchrun", backend="native")


# Both ranks of the first host end with their batches before the other one.
JOINING = """
import sys

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
optimizer = dd.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), compression=Own() if "own" in sys.argv else None)
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
    names = launch.write("hosts", f"127.0.0.1 localhost {socket.gethostname()}\n")
    script = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', names, sys.executable, *words)
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


@pytest.mark.parametrize("compression", ["own", "none"])
def test_a_host_whose_ranks_have_all_joined_takes_part_in_collectives_of_the_others(
    launch: Launch, hosts: Hosts, compression: str
) -> None:
    """Also where a custom compressor's messages are too large for Gloo's path for few values."""
    given = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
    for seen in run_of_three(launch, hosts, given, "-c", JOINING, compression):
        assert (seen["transport"], seen["last"]) == ("shm", 2)
        assert seen["weight"] == [pytest.approx(-(1 + 1 + 1 / 3 + 1 / 3))]

"""Failed jobs: the first failing rank, its traceback, the exit code; relays and variables of ranks."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.jobs import Launch

from dualdist.launch import env_defaults
from dualdist.launch.failure import (
    RankEnd,
    describe_failure,
    exit_code,
    extract_traceback,
    first_failure,
    is_consequence,
)
from dualdist.launch.relay import OutputRelay
from dualdist.utils import control_channel

VALUE_ERROR = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\nValueError: one\ntwo'
KEY_ERROR = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nKeyError: 1'
CHAIN = f"{KEY_ERROR}\n\nThe above exception was the direct cause of the following exception:\n\n{VALUE_ERROR}"
STACK = "".join(f'\n    File "train.py", line {number}, in f\n      g()' for number in range(3))
LOST = "Traceback (most recent call last):\n  ...\ndualdist.errors.RankLostError: rank 1 ended"


def prefixed(text: str) -> str:
    return "".join(f"[rank3]: {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"warning\n{VALUE_ERROR}\n", VALUE_ERROR),
        (f"{KEY_ERROR}\nlogged, and went on\n{VALUE_ERROR}\n", VALUE_ERROR),
        (f"before\n{CHAIN}\n", CHAIN),
        (f"[W1121 socket.cpp:207] noise\n{prefixed(VALUE_ERROR)}[W1121 noise\n", VALUE_ERROR),
        (f"{VALUE_ERROR}\nException ignored in: <function f>\n{KEY_ERROR}\n", VALUE_ERROR),
        (f"Exception in thread Thread-1:\n{KEY_ERROR}\n", f"Exception in thread Thread-1:\n{KEY_ERROR}"),
        ('  File "x.py", line 1\n    def\nSyntaxError: invalid\n',
         'File "x.py", line 1\n    def\nSyntaxError: invalid'),
        ("\n".join(map(str, range(100))), "\n".join(map(str, range(80, 100)))),
        ("", ""),
    ],
)  # fmt: skip
def test_the_traceback_that_ended_a_rank_is_found(text: str, expected: str) -> None:
    assert extract_traceback(text) == expected


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("dualdist.errors.RankLostError: rank 1 ended", True),
        ("RankLostError: rank 1 ended", True),
        ("horovod.common.exceptions.HorovodInternalError: x", True),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:1", True),
        (f"dualdist.errors.CollectiveTimeoutError: barrier 'b': late\n  Stack of rank 1:{STACK}", True),
        ("ValueError: x", False),
        ("MyRankLostErrorLike: x", False),
    ],
)
def test_consequences_of_another_ranks_end_are_recognised(last: str, expected: bool) -> None:
    assert is_consequence(f"Traceback (most recent call last):\n  ...\n{last}") is expected


def ended(number: int, code: int | None, at_s: float, text: str = "", **more: object) -> RankEnd:
    return RankEnd(number, "host", code, at_s, text=text, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([ended(0, 1, 2.0), ended(1, 1, 1.0)], 1),
        ([ended(0, 1, 1.0, LOST), ended(1, -9, 2.0)], 1),
        ([ended(0, 1, 1.0, LOST), ended(1, 1, 2.0, LOST)], 0),
        ([ended(0, -15, 1.0, was_terminated=True), ended(1, 1, 2.0)], 1),
        ([ended(0, None, 1.0), ended(1, 1, 2.0)], 1),
        ([ended(0, None, 1.0), ended(1, None, 2.0, VALUE_ERROR), ended(2, None, 3.0)], 1),
        ([ended(0, 0, 1.0)], None),
        ([], None),
    ],
    ids=["time", "consequence", "only consequences", "message to", "lost", "lost by a failure", "success", "none"],
)
def test_the_first_failure_is_no_consequence_of_another(ends: list[RankEnd], first: int | None) -> None:
    found = first_failure(ends)
    assert (None if found is None else found.rank) == first


@pytest.mark.parametrize(
    ("launchers", "code", "launcher_restarts_ranks", "expected"),
    [
        ([1], 7, False, 7),
        ([1], -9, False, 137),
        ([0], 7, False, 7),
        ([0], 7, True, 0),
        ([1], 7, True, 7),
        ([-9], 0, False, 137),
        ([0, 3], 0, False, 3),
        ([0], None, False, 137),
        ([0], None, True, 0),
        ([255], None, False, 255),
        ([-11], None, False, 137),
    ],
)
def test_exit_code_is_the_first_failing_ranks(
    launchers: list[int], code: int | None, launcher_restarts_ranks: bool, expected: int
) -> None:
    failure = None if code == 0 else ended(1, code, 1.0)
    assert exit_code(launchers, failure, launcher_restarts_ranks=launcher_restarts_ranks) == expected


@pytest.mark.parametrize(
    ("code", "words"),
    [(-11, "ended by SIGSEGV"), (-9, "ended by SIGKILL; out of memory? see dmesg"), (-40, "ended by signal 40")],
)
def test_the_signal_that_ended_a_rank_is_named(code: int, words: str) -> None:
    assert describe_failure(ended(3, code, 0.0), has_hosts=False) == f"rank 3 failed first ({words})"


def test_a_rank_that_reaches_no_dualdist_run_names_each_address_and_why() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        port = unused.getsockname()[1]
        address = control_channel.ControlAddress(("127.0.0.1", "localhost"), port, "secret")
        hello = control_channel.RankHello("secret", 0, "n1")
        with pytest.raises(
            control_channel.ControlChannelError,
            match=rf"port {port}, 127\.0\.0\.1: Connection refused; localhost: Connection refused",
        ) as caught:
            control_channel.connect(address, hello)
    assert caught.value.is_gone


@pytest.mark.parametrize(
    ("chunks", "tag", "strip", "expected"),
    [
        ([b"a\nb\n"], "", "", b"a\nb\n"),
        ([b"a\nb"], "[1] ", "", b"[1] a\n[1] b\n"),
        ([b"a", b"b\nc", b"\n"], "[1] ", "", b"[1] ab\n[1] c\n"),
        ([b"10%\r20%\r\nend\n"], "[1] ", "", b"[1] 10%\n[1] 20%\n[1] end\n"),
        ([b"[0]<stdout>:a\n", b"[0]<std", b"err>:[0]<stdout>:b\n", b"x [0]<stdout>:\n"], "", r"\[0\]<std(out|err)>:",
         b"a\n[0]<stdout>:b\nx [0]<stdout>:\n"),
        ([b"\xff\n"], "[1] ", "", b"[1] \xff\n"),
    ],
    ids=["as it is", "last line", "parts", "progress", "prefix", "bytes"],
)  # fmt: skip
def test_lines_are_relayed_whole(chunks: list[bytes], tag: str, strip: str, expected: bytes) -> None:
    (source, writer), (reader, target) = os.pipe(), os.pipe()
    relay = OutputRelay(source, [target], tag=tag, strip=strip, keep=4)
    for chunk in chunks:
        os.write(writer, chunk)
        relay.pump()
    os.close(writer)
    relay.pump()
    os.close(target)
    assert os.read(reader, 1000) == expected
    assert not relay.is_open
    assert relay.tail == b"".join(chunks)[-4:]
    os.close(reader)


def test_a_reader_that_has_gone_ends_the_writer() -> None:
    (source, writer), (reader, target) = os.pipe(), os.pipe()
    relay = OutputRelay(source, [target])
    os.close(reader)
    os.write(writer, b"a\n")
    relay.pump()
    assert not relay.is_open
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"b")
    for end in (writer, target):
        os.close(end)


def test_lines_of_several_writers_stay_whole_and_a_prompt_is_shown() -> None:
    (source, writer), (reader, target) = os.pipe(), os.pipe()
    relay = OutputRelay(source, [target])
    for word in (b"10%\r", b"a ", b"b\nc"):
        os.write(writer, word)
        relay.pump()
    assert os.read(reader, 1000) == b"10%\ra b\n"
    while relay.has_partial_line:
        relay.flush_partial_line()
    assert os.read(reader, 1000) == b"c"
    for end in (writer, target, reader, source):
        os.close(end)


def test_what_a_launcher_writes_between_frames_is_hidden_after_a_failure() -> None:
    """The frames of two ranks and the launcher's words come in any order, and in any pieces."""
    (source, pipe), (reader, target) = os.pipe(), os.pipe()
    (ranks, writer), failing = os.pipe(), []
    wrapper = OutputRelay(ranks, [pipe], framed=pipe)
    relay = OutputRelay(source, [target], hides_unframed=lambda: bool(failing))
    os.write(pipe, b"a warning\n")
    os.write(writer, b"of a \x1frank\nand " + b"x" * 5000 + b"\n")
    wrapper.pump()
    relay.pump()
    failing.append(True)
    os.write(pipe, b"Traceback\n\x1ehalf a")
    relay.pump()
    os.write(pipe, b" frame\x1fChildFailedError\n")
    relay.pump()
    expected = b"a warning\nof a rank\nand " + b"x" * 5000 + b"\nhalf a frame"
    assert os.read(reader, 10000) == expected
    for end in (source, pipe, reader, target, ranks, writer):
        os.close(end)


OMP = "OMP_NUM_THREADS"
JOBS = {"PYTHONPATH": "/p", "NCCL_DEBUG": "INFO", OMP: "7", "DUALDIST_BACKEND": "native"}
OTHERS = ("DUALDIST_JOB", "DUALDIST_RUN", "AWS_SECRET", "CUDA_VISIBLE_DEVICES", "PATH")


@pytest.mark.parametrize(
    ("environ", "given", "options", "expected"),
    [
        ({}, {}, {}, {OMP: "4"}),
        ({OMP: "7"}, {}, {}, {}),
        ({OMP: "7"}, {OMP: "2"}, {}, {OMP: "2"}),
        (JOBS | dict.fromkeys(OTHERS, "x"), {}, {"has_hosts": True}, JOBS),
    ],
    ids=["ours", "the user's", "the job's", "other hosts get the job's"],
)
def test_a_rank_gets_the_variables_of_the_job_then_the_users_then_ours(
    environ: dict[str, str], given: dict[str, str], options: Any, expected: dict[str, str]
) -> None:
    found = env_defaults.rank_variables(
        environ, given, **{"threads": 4, "interface": None, "has_hosts": False, **options}
    )
    assert found == expected
    found = env_defaults.rank_variables({}, {}, threads=None, interface="ib0", has_hosts=False)
    assert [env_defaults.threads_per_rank(*each) for each in ((8, 2), (8, 3), (2, 4))] == [4, 2, 1]
    assert {found[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")} == {"ib0"}


def test_a_rank_leaves_none_of_its_own_shared_memory_of_open_mpi_behind(launch: Launch) -> None:
    """mpirun removes it, unless it was killed; that of other jobs, users and ranks stays."""
    job, host, user = 0x7FAB0001, f"test{os.getpid()}", os.geteuid()
    own = [f"vader_segment.{host}.{user}.{job:x}.1", f"sm_segment.{host}.{user}.{job:x}.1"]
    others = [f"vader_segment.{host}.{user}.{job:x}.11", f"vader_segment.{host}.{user + 1}.{job:x}.1"]
    paths = [Path("/dev/shm", name) for name in (*own, *others)]
    for path in paths:
        path.touch()
    try:
        env = {"OMPI_MCA_ess_base_jobid": str(job), "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        program = launch.write("x.py", "print('it ran')")
        outcome = launch([sys.executable, "-m", "dualdist.launch.rank", program], env=env)
        assert outcome.stdout == "it ran\n"
        assert [path.exists() for path in paths] == [False, False, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)

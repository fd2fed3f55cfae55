"""`dualdist run` on one host, by every launcher: output of ranks, failures, and that no process stays."""

import json
import os
import pty
import re
import signal
import subprocess
import time

import psutil
import pytest
from harness import mpi
from harness.jobs import Job, Launch
from harness.slurm import Slurm
from launch.running import (
    LAUNCHERS,
    PROGRAM,
    RUN,
    TINY_RANK,
    WAIT_S,
    last_words,
    lines,
    run_with_mpich,
    start,
    wait_for,
)


def descendants(job: Job) -> list[psutil.Process]:
    return psutil.Process(job.pid).children(recursive=True)


def find(job: Job, *words: str) -> psutil.Process:
    """Return the first descendant, parents before children, whose command line has all words."""
    (found, *_) = [
        process for process in descendants(job) if all(word in " ".join(process.cmdline()) for word in words)
    ]
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lines_are_tagged_by_rank(launch: Launch, launcher: str) -> None:
    outcome = launch([*RUN, "-np", "2", "--launcher", launcher, "--tag-output", PROGRAM])
    name = "horovodrun" if launcher == "horovodrun-mpi" else launcher
    assert lines(outcome.stdout) == [f"[{rank}] out {rank}/2 {name} threads=1" for rank in range(2)]
    if launcher != "horovodrun-mpi":  # its mpirun hands on stderr as stdout or not, by version
        assert lines(outcome.stderr) == ["[0] err 0", "[1] err 1"]


PRINTING = """
import os, signal, sys, time
for n in range(200):
    print("the", "line", n, "of", os.getpid(), "ends")
    print("error", n, "ends", file=sys.stderr)
    time.sleep(0.001)
print("last", "words")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.smoke("spawn")
@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun", "mpirun", "spawn"])
def test_each_line_that_ranks_print_stays_whole_and_none_is_lost(launch: Launch, launcher: str) -> None:
    """Each word is a write of its own where Python does not buffer; the ranks are killed right after the last."""
    script = launch.write("script.py", PRINTING)
    outcome = launch([*RUN, "-np", "2", "--launcher", launcher, script], check=False)
    for text, last, pattern in (
        (outcome.stdout, ["last words"], r"the line \d+ of \d+ ends"),
        (outcome.stderr, [], r"error \d+ ends"),
    ):
        found = [line for line in text.splitlines() if re.fullmatch(pattern, line) or line in last]
        assert len(found) >= 200 + len(last), str(outcome)  # one may be killed with the other
        others = [line for line in text.splitlines() if line not in found and ("ends" in line or "words" in line)]
        assert not others, others


def test_the_progress_bar_of_rank_0_is_drawn_on_the_terminal_of_dualdist_run(launch: Launch) -> None:
    script = launch.write("script.py", "import dualdist as dd\nfor _ in dd.progress(range(3), 'epoch 1'):\n    pass\n")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        with os.fdopen(theirs, "wb") as terminal:
            line = [*RUN, "-np", "2", "--launcher", "spawn", script]
            subprocess.run(line, env=launch.env, stderr=terminal, stdout=subprocess.PIPE, check=True, timeout=WAIT_S)
        assert "\repoch 1: 100% |####################| 3/3 in 0:00, " in screen.read(65536).decode()


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_each_rank_has_a_log_of_its_own(launch: Launch, launcher: str) -> None:
    outcome = launch([*RUN, "-np", "2", "--launcher", launcher, "--log-dir", "logs", PROGRAM])
    assert lines(outcome.stdout + outcome.stderr) == []
    for rank in range(2):
        log = (launch.directory / "logs" / f"rank-{rank}.log").read_text()
        assert lines(log) == [f"err {rank}", f"out {rank}/2 {launcher} threads=1"]


def test_a_log_that_cannot_be_written_is_an_error(launch: Launch) -> None:
    (launch.directory / "file").touch()
    outcome = launch([*RUN, "--launcher", "python", "--log-dir", "file/logs", PROGRAM], check=False)
    error = "rank 0 cannot write its log ([Errno 20] Not a directory: 'file/logs'): choose another folder by --log-dir"
    assert last_words(outcome.stderr) == ["dualdist run: rank 0 failed first (exit code 1):", error]
    assert "Traceback" not in outcome.stderr


def test_stdin_reaches_a_rank(launch: Launch) -> None:
    launch.write("data", "some data\n")
    line = ["sh", "-c", 'exec "$@" <data', "sh", *RUN, "--launcher", "mpirun", PROGRAM, "stdin"]
    assert "some data\n" in launch(line).stdout


@pytest.mark.smoke
def test_mpich_starts_the_job_where_its_mpirun_comes_first(launch: Launch, mpich: mpi.MPICH) -> None:
    """Its ranks talk to it by a file that they inherit."""
    run, env = run_with_mpich(launch, mpich)
    outcome = launch([*run, "-np", "2", PROGRAM], env=env)
    assert lines(outcome.stdout) == [f"[{rank}] out {rank}/2 mpirun threads=1" for rank in range(2)]


def test_mpichs_ranks_train_and_their_failures_are_named(launch: Launch, mpich: mpi.MPICH) -> None:
    run, env = run_with_mpich(launch, mpich)
    reports = launch.reports([*run, "-np", "2", TINY_RANK, "mpi"], 2, env={**env, **mpi.of_mpich(launch.directory)})
    assert {seen["transport"] for seen in reports} == {"mpi"}
    script = launch.write(
        "script.py",
        "import dualdist as dd\ndd.init('mpi')\nif dd.rank() == 1:\n    raise ValueError('the reason')\ndd.barrier()\n",
    )
    outcome = launch([*run, "-np", "3", script], env={**env, **mpi.of_mpich(launch.directory)}, check=False)
    first, *rest = last_words(outcome.stderr)
    assert outcome.rc == 1, str(outcome)
    # MPI_Abort kills all ranks and their parents at once.
    assert first == "dualdist run: rank 1 failed first, and was killed before it reported an exit code:", str(outcome)
    assert "ValueError: the reason" in rest


@pytest.mark.smoke
def test_the_output_of_a_dry_run_can_be_pasted(launch: Launch) -> None:
    for launcher in ("mpirun", "spawn"):
        printed = launch([*RUN, "-np", "2", "--launcher", launcher, "--tag-output", "--dry-run", PROGRAM]).stdout
        outcome = launch(["sh", "-c", printed])
        assert lines(outcome.stdout) == [f"[{rank}] out {rank}/2 {launcher} threads=1" for rank in range(2)]


@pytest.mark.smoke
def test_a_job_file_starts_a_job_and_the_command_line_goes_before_it(launch: Launch) -> None:
    launch.write(
        "job.yaml", f"program: {PROGRAM}\nranks: 2\nlauncher: spawn\ntag_output: true\nenv:\n  OMP_NUM_THREADS: 3\n"
    )
    outcome = launch([*RUN, "--config", "job.yaml"])
    assert lines(outcome.stdout) == [f"[{rank}] out {rank}/2 spawn threads=3" for rank in range(2)]
    outcome = launch([*RUN, "--config", "job.yaml", "-np", "1", "--env", "OMP_NUM_THREADS=4"])
    assert lines(outcome.stdout) == ["[0] out 0/1 spawn threads=4"]


@pytest.mark.smoke("mpirun-kill-137-ended by SIGKILL", "torchrun-raise-1-exit code 1")
@pytest.mark.parametrize(
    ("launcher", "how", "code", "words"),
    [
        ("torchrun", "raise", 1, "exit code 1"),
        ("horovodrun", "raise", 1, "exit code 1"),
        ("mpirun", "exit", 7, "exit code 7"),
        ("mpirun", "kill", 137, "ended by SIGKILL"),
        ("spawn", "leave", 3, "exit code 3"),
    ],
)
def test_the_first_failing_rank_is_named_last_and_gives_the_exit_code(
    launch: Launch, launcher: str, how: str, code: int, words: str
) -> None:
    """The other rank hangs and ignores SIGTERM."""
    outcome = launch([*RUN, "-np", "2", "--launcher", launcher, PROGRAM, how], check=False)
    assert outcome.rc == code, str(outcome)
    assert outcome.seconds < 30, str(outcome)
    first, *rest = last_words(outcome.stderr)
    assert first.startswith(f"dualdist run: rank 1 failed first ({words}"), str(outcome)
    assert "ChildFailedError" not in outcome.stderr, "torchrun's own words"
    if how == "raise":
        assert "KeyError: 'what it was about'" in rest
        assert rest[-1] == "ValueError: the first real reason"


@pytest.mark.smoke("mpirun-launcher", "spawn-run")
@pytest.mark.parametrize(
    ("launcher", "what"),
    [
        ("torchrun", "ctrl-c"),  # handled here, whatever the launcher
        ("torchrun", "launcher"),
        ("mpirun", "launcher"),
        ("torchrun", "run"),
        ("horovodrun", "run"),
        ("mpirun", "run"),
        ("spawn", "run"),
        ("spawn", "parent of a rank"),  # which cannot end its child
    ],
)
def test_nothing_outlives_what_ended_the_job(launch: Launch, launcher: str, what: str) -> None:
    """Ctrl-C, or a process of the job is killed; the ranks ignore SIGTERM."""
    words = [PROGRAM, "hang", "-1", str(launch.directory)]
    with start(launch, [*RUN, "-np", "2", "--launcher", launcher, *words]) as job:
        wait_for(*(launch.directory / f"up-{rank}" for rank in range(2)))
        run = find(job, "-m dualdist run")
        others = [process for process in descendants(job) if process != run]
        began = time.monotonic()
        if what == "ctrl-c":
            run.send_signal(signal.SIGINT)
        elif what == "parent of a rank":
            find(job, "dualdist.launch.rank").kill()
        else:
            (run if what == "run" else run.children()[0]).kill()
        _, alive = psutil.wait_procs(others, timeout=20)
        assert not alive, f"{[process.cmdline() for process in alive]}"
        assert time.monotonic() - began < 15
        outcome = job.wait(WAIT_S)
    code = {"ctrl-c": 130, "launcher": 137, "run": -signal.SIGKILL, "parent of a rank": 137}[what]
    assert outcome.rc == code, str(outcome)
    if what == "parent of a rank":
        assert "was lost" in last_words(outcome.stderr)[0]
    if what == "ctrl-c":
        assert outcome.stderr.endswith("dualdist run: interrupted\n")
        assert "SignalException" not in outcome.stderr, "torchrun's own words"
    if what == "launcher":
        assert "no rank reported a failure" in last_words(outcome.stderr)[-1]


# One rank has saved, so that the job can be resumed, whatever becomes of the other.
ONE_STOPS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if os.environ['DUALDIST_RANK'] == '1' else 7))"


@pytest.mark.smoke("ends", "stops")
@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("", 143, "dualdist run: the job was ended by SIGTERM"),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", 0, None),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", 75, "the job stopped as requested"),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 143, "dualdist run: the job was ended by SIGTERM"),
        (ONE_STOPS, 75, "the job stopped as requested"),
    ],
    ids=["ends", "finishes", "stops", "fails", "one stops, one fails"],
)
def test_sigterm_reaches_the_ranks_whose_exit_codes_count(
    launch: Launch, way: str, code: int, words: str | None
) -> None:
    """The launcher does not get it, and no rank is restarted."""
    script = launch.write(
        "script.py",
        f"import os, pathlib, signal, sys, time\n{way}\n"
        "pathlib.Path(f'up-{os.environ[\"DUALDIST_RANK\"]}').touch(exist_ok=False)\ntime.sleep(600)\n",
    )
    arguments = ["-np", "2", "--launcher", "spawn", "--max-restarts", "2", script]
    with launch.start([*RUN, *arguments]) as job:
        wait_for(*(launch.directory / f"up-{rank}" for rank in range(2)))
        find(job, "-m dualdist run").send_signal(signal.SIGTERM)
        outcome = job.wait(20)
    assert outcome.rc == code, str(outcome)
    assert not outcome.left
    assert (words is None) == (outcome.stderr == ""), str(outcome)
    assert words is None or words in last_words(outcome.stderr)[0]


ORPHANS = """
import os, pathlib, subprocess, sys, time
orphan = 'sleep "$0" >/dev/null 2>&1 & echo $!'
short = subprocess.run(["sh", "-c", orphan, "0"], env={}, stdout=subprocess.PIPE, text=True).stdout.strip()
while pathlib.Path(f"/proc/{short}").exists():
    time.sleep(0.01)
long = subprocess.run(["sh", "-c", orphan, "600"], env={}, stdout=subprocess.PIPE, text=True, start_new_session=True)
own = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
print(long.stdout.strip(), own.pid, flush=True)
if sys.argv[1] == "hang":
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["end", "hang"])
def test_processes_that_a_rank_started_end_with_it(launch: Launch, how: str) -> None:
    """Children and orphans, without a variable of the job, in other sessions."""
    script = launch.write("script.py", ORPHANS)
    outcome = launch([*RUN, "--launcher", "torchrun", "--timeout", "15", script, how], check=how == "end")
    pids = [int(word) for word in outcome.stdout.split()]
    assert len(pids) == 2, str(outcome)
    assert not [pid for pid in pids if psutil.pid_exists(pid)], str(outcome)


def test_a_job_is_ended_when_its_time_is_up(launch: Launch) -> None:
    words = [PROGRAM, "hang", "-1", str(launch.directory)]
    outcome = launch([*RUN, "-np", "2", "--launcher", "spawn", "--timeout", "3", *words], check=False)
    assert outcome.rc == 124
    assert last_words(outcome.stderr)[0].startswith("dualdist run: the job was not done after 3 s; still running: ")


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_failed_job_is_started_again(launch: Launch, launcher: str) -> None:
    words = ["--max-restarts", "1", "--log-dir", "logs", "--json", "report.json", PROGRAM]
    line = [*RUN, "-np", "2", "--launcher", launcher, *words, "once", "1", str(launch.directory)]
    # Only rank 1 fails in the first round: the others hold until they are ended.
    (launch.directory / "rank-0").touch()
    outcome = launch(line)
    log = (launch.directory / "logs" / "rank-1.log").read_text()
    assert "ValueError: the first real reason" in log
    assert "second time" in log.splitlines()
    report = json.loads((launch.directory / "report.json").read_text())
    assert (report["launcher"], report["restarts"]) == (launcher, 1)
    assert report["outcome"]["code"] == 0
    assert "rank 1 failed; restarting all ranks, 1 of 1 times" in outcome.stderr


@pytest.mark.smoke
def test_restarts_are_limited(launch: Launch) -> None:
    words = ["--max-restarts", "1", "--json", "-", PROGRAM, "exit", "0"]
    outcome = launch([*RUN, "--launcher", "spawn", *words], check=False)
    assert outcome.rc == 7
    report = json.loads(outcome.stdout)  # what the ranks print is elsewhere
    assert (report["restarts"], report["outcome"]["failure"]["code"]) == (1, 7)
    assert 0 < report["outcome"]["seconds"] < outcome.seconds
    assert outcome.stderr.count("out 0/1") == 2


@pytest.mark.smoke
def test_srun_of_an_allocation_spreads_the_ranks_and_reports_their_end(launch: Launch, slurm: Slurm) -> None:
    words = ["-np", "2", "--tag-output", PROGRAM, "raise"]
    outcome = launch([*slurm.salloc("-N2", "-n2"), *RUN, *words], env=slurm.env, check=False)
    assert "srun starts 2 rank(s), as no --launcher was given and this is a Slurm allocation" in outcome.stderr
    assert "[1 n2] err 1" in outcome.stderr.splitlines(), str(outcome)
    assert last_words(outcome.stderr)[0] == "dualdist run: rank 1 on n2 failed first (exit code 1):", str(outcome)


@pytest.mark.smoke
def test_an_allocation_gives_the_numbers_of_ranks_and_cores(launch: Launch, slurm: Slurm) -> None:
    argv = ["env", "--unset=OMP_NUM_THREADS", *slurm.salloc("-N2", "-n2", "-c2"), *RUN, PROGRAM]
    outcome = launch(argv, env=slurm.env)
    assert "srun starts 2 rank(s) (SLURM_NTASKS=2), as no --launcher was given" in outcome.stderr
    assert lines(outcome.stdout) == [f"out {rank}/2 srun threads=2" for rank in range(2)], str(outcome)


def test_within_a_step_no_other_step_is_started(launch: Launch, slurm: Slurm) -> None:
    argv = [*slurm.salloc("-N1", "-n2"), *slurm.srun("-n1", "-c2"), *RUN, "--verbose", "-np", "2", PROGRAM]
    outcome = launch(argv, env=slurm.env)
    assert "torchrun starts 2 rank(s), as no --launcher was given and srun started this process" in outcome.stderr
    assert lines(outcome.stdout) == [f"out {rank}/2 torchrun threads=1" for rank in range(2)], str(outcome)

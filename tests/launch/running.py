"""Helpers to start `dualdist run`, job scripts and single ranks, and to read what these print and report."""

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import mpi, problem
from harness.installed import lack
from harness.jobs import REPORT_DIR, Job, Launch, Outcome, collect
from harness.slurm import eventually

from dualdist.bench.slow_link import PROGRAMS

PROGRAM = str(Path(__file__).with_name("run_program.py"))
TINY_RANK = str(Path(problem.__file__).with_name("tiny_rank.py"))
RUN = (sys.executable, "-m", "dualdist", "run")
EXEC = (sys.executable, "-m", "dualdist", "exec")
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
# What comes before a program on two ranks, by launcher.
EXEC_STARTS: dict[str, Sequence[str]] = {
    "torchrun": (*TORCHRUN, "-m", "dualdist", "exec"),
    "horovodrun": ("horovodrun", "-np", "2", *EXEC),
    "mpirun": (*mpi.OpenMPI("mpirun").run(2), *EXEC),
    "mpich": (*mpi.MPICH(str(mpi.PYPIS_MPICH / "bin" / "mpiexec")).run(2), *EXEC),
}
LAUNCHERS = ("torchrun", "horovodrun", "horovodrun-mpi", "mpirun", "spawn")
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
# The second network of each host of two_hosts leads nowhere.
AWAY = {"OMPI_MCA_oob_tcp_if_include": "eth0", "OMPI_MCA_btl_tcp_if_include": "eth0", "HOROVOD_GLOO_IFACE": "eth0"}
# More than two gradients are added in an order of the backend's own, each sum rounding to 2**-24 of its size.
TOLERANCE = 1e-6
WAIT_S = 60.0

# There is no server of PBS or LSF here. These do on one host what the manuals say that pbsdsh and jsrun do: pbsdsh's
# tasks have their own host names, which dualdist takes for other hosts, and none of our variables.
PBSDSH = """#!/bin/sh
# pbsdsh -n INDEX -- PROGRAM ARGUMENT...
index=$2; shift 3
exec env -i PATH=/usr/bin:/bin PBS_JOBID="$PBS_JOBID" PBS_NODENUM="$index" HOSTS="${0%pbsdsh}hosts" \\
    unshare --uts --mount sh -c 'mount --bind "$HOSTS" /etc/hosts; hostname "node$PBS_NODENUM"; exec "$@"' sh "$@"
"""
JSRUN = """#!/bin/sh
# jsrun --nrs N --rs_per_host N ... --bind B PROGRAM ARGUMENT...
sets=$2; host=$4; shift 12
rank=0
while [ $rank -lt $sets ]; do
    JSM_NAMESPACE_RANK=$rank JSM_NAMESPACE_SIZE=$sets JSM_NAMESPACE_LOCAL_RANK=$((rank % host)) \\
        JSM_NAMESPACE_LOCAL_SIZE=$host "$@" &
    rank=$((rank + 1))
done
wait
"""


def printed(launch: Launch, code: str) -> str:
    """Return what Python prints for the code."""
    return launch([sys.executable, "-c", code]).stdout.strip()


def blocks(readme: Path, language: str = "") -> list[str]:
    """Return the fenced blocks of a README in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)
    return [body for named, body in found if named == language]


def sides(launch: Launch, diff: str, text: str = "{}") -> list[str]:
    """Write the programs before and after a diff, put into the text, and return their paths."""
    found = []
    for sign, name in (("-", "before.py"), ("+", "after.py")):
        lines = [line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", sign)]
        found.append(launch.write(name, text.format("".join(lines))))
    return found


def commands(readme: Path, begin: str) -> list[list[str]]:
    """Return the words of a README's lines that begin so."""
    lines = readme.read_text().splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{begin} ")]


def need_slow_link(env: Mapping[str, str]) -> None:
    """Skip the test where --slow-link cannot work."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=env["PATH"]) is None]:
        lack(", ".join(lacking), "iproute2 util-linux")


def check_refused(launch: Launch, argv: Sequence[str], expected: str, env: Mapping[str, str] | None = None) -> None:
    """Check that a `dualdist` command ends with code 2 and one line on stderr that contains `expected`."""
    outcome = launch(argv, env=env, check=False)
    assert outcome.rc == 2, str(outcome)
    assert expected in outcome.stderr
    assert outcome.stderr.startswith(f"dualdist {argv[3]}: ")
    assert len(outcome.stderr.splitlines()) == 1
    assert outcome.stdout == ""


def lines(text: str) -> list[str]:
    """Return the lines of PROGRAM's ranks, sorted."""
    return sorted(line for line in text.splitlines() if re.search(r"(out|err) \d", line))


def last_words(stderr: str) -> list[str]:
    """Return the last message of `dualdist run`, by lines."""
    return stderr[stderr.rindex("dualdist run: ") :].splitlines()


def wait_for(*paths: Path) -> None:
    assert eventually(lambda: all(path.exists() for path in paths), within_s=WAIT_S), f"no {paths}"


def start(launch: Launch, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Job:
    """Start a job like launch.start(), whose guard leaves it WAIT_S to end the processes that it started."""
    return Job(argv, env={**launch.env, **(env or {})}, cwd=launch.directory, grace_s=WAIT_S)


def interrupted(launch: Launch, argv: Sequence[str], once_it_says: str) -> Outcome:
    """Send Ctrl-C to the command once its output has these words, and return its outcome."""
    with launch.start(argv) as job:
        assert eventually(lambda: once_it_says in job.output(), within_s=WAIT_S), job.output()
        (command, *_) = psutil.Process(job.pid).children()
        command.send_signal(signal.SIGINT)
        return job.wait(WAIT_S)


def side_by_side(launch: Launch, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[Outcome]:
    """Run commands, each with its variables, at the same time."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(launch.start(argv, env=env)) for argv, env in commands]
        return [job.wait(100) for job in jobs]


def collected(
    launch: Launch, size: int, run: Callable[[dict[str, str]], Outcome | Sequence[Outcome]]
) -> list[dict[str, Any]]:
    """Return the reports of the ranks that `run` starts, given the variable that says where these report."""
    folder = Path(tempfile.mkdtemp(prefix="reports-", dir=launch.directory))
    found = run({REPORT_DIR: str(folder)})
    outcomes = [found] if isinstance(found, Outcome) else found
    return collect(folder, size, next((outcome for outcome in outcomes if outcome.rc), outcomes[0]))


def rank_env(rank: int, size: int, local_rank: int = 0, local_size: int = 1) -> dict[str, str]:
    """Return the variables of a rank without a launcher."""
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"DUALDIST_{name}": str(number) for name, number in numbers.items()}


def check(reports: Sequence[Mapping[str, Any]], per_node: Sequence[int], **same: str) -> None:
    """Check that ranks fill node after node, report `same` and exact sums, and have what one process trains."""
    size = sum(per_node)
    expected = problem.trained_by_one_process(size)
    places = [(node, local_rank) for node, count in enumerate(per_node) for local_rank in range(count)]
    for rank, (seen, (node, local_rank)) in enumerate(zip(reports, places, strict=True)):
        place = {"rank": rank, "size": size, "node_rank": node, "num_nodes": len(per_node)}
        place |= {"local_rank": local_rank, "local_size": per_node[node]}
        wanted = {**place, **same, "sum": [(1 << size) - 1, size << 40]}
        assert {name: seen[name] for name in wanted} == wanted
        assert seen["parameters"] == reports[0]["parameters"], "ranks differ"
    tolerance = {"rel": TOLERANCE, "abs": TOLERANCE} if size > 2 else {"rel": 0, "abs": 0}
    assert reports[0]["parameters"] == pytest.approx(expected, **tolerance)


def stand_in(launch: Launch, name: str, text: str) -> dict[str, str]:
    """Write a program, and return a PATH on which it comes first."""
    path = Path(launch.write(f"bin/{name}", text))
    path.chmod(0o755)
    return {"PATH": f"{path.parent}:{launch.env['PATH']}"}


def written(launch: Launch, *options: str, program: Sequence[str]) -> str:
    """Return the path of the job script that `dualdist run --write` writes."""
    path = str(launch.directory / "job.sh")
    launch([*RUN, *options, "--write", path, *program])
    return path


def run_with_mpich(launch: Launch, mpich: mpi.MPICH) -> tuple[list[str], dict[str, str]]:
    """Return `dualdist run`, with its variables, by an interpreter that has MPICH's mpirun beside it."""
    stand_in(launch, "mpirun", f'#!/bin/sh\nexec {mpich.mpiexec} "$@"\n')
    python = launch.directory / "bin" / "python3"
    python.symlink_to(Path(sys.executable).resolve())
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    run = [str(python), "-m", "dualdist", "run", "--launcher", "mpirun", "--tag-output"]
    return run, {"PYTHONPATH": f"{launch.env['PYTHONPATH']}:{packages}"}

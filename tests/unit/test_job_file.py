"""Job files: the values of every key, and one error message with file and line for each mistake."""

import os
from pathlib import Path

import pytest

from dualdist.errors import UsageError
from dualdist.launch.job_file import JobFile, Resources, load, loads
from dualdist.launch.schedulers import SCHEDULERS

WHOLE = """\
program: train.py  # or module
args: [--lr, 1e-3, --steps, 010]
ranks: 4
launcher: mpirun
backend: horovod
transport: mpi
hosts: a:2,b:2
network_interface: eth1
env:
  DEBUG: on
  LEVEL: 010
  EMPTY:
max_restarts: 2
timeout: 60
log_dir: logs
tag_output: true
resources:
  nodes: 2
  tasks_per_node: 2
  gpus_per_node: 0
  cpus_per_task: 8
  memory: 64G
  time: 2:00:00
  partition: long
  account: 0815
  job_name: 7
  setup: |
    module load openmpi
    source env/bin/activate
  container: image.sif
"""


def errors_of(text: str, horovod_has_mpi: bool | None = None) -> list[str]:
    with pytest.raises(UsageError) as caught:
        loads(text, "job.yaml", horovod_has_mpi=horovod_has_mpi)
    return str(caught.value).splitlines()


def test_values_keep_their_spelling_and_an_empty_file_has_defaults() -> None:
    assert loads("# nothing yet\n", "job.yaml") == JobFile()
    assert loads(WHOLE, "job.yaml") == JobFile(
        program="train.py",
        args=("--lr", "1e-3", "--steps", "010"),
        ranks=4,
        launcher="mpirun",
        backend="horovod",
        transport="mpi",
        hosts=("a:2", "b:2"),
        network_interface="eth1",
        env={"DEBUG": "on", "LEVEL": "010", "EMPTY": ""},
        max_restarts=2,
        timeout=60.0,
        log_dir="logs",
        tag_output=True,
        resources=Resources(
            nodes=2, tasks_per_node=2, gpus_per_node=0, cpus_per_task=8, memory="64G", time="2:00:00",
            partition="long", account="0815", job_name="7", setup=("module load openmpi", "source env/bin/activate"),
            container="image.sif",
        ),
    )  # fmt: skip
    job = loads("program: train.py\nargs: [~, null, '', 1_000]\nenv: {A: ~, B: null, C: , D: 2.0}", "job.yaml")
    assert job.args == ("~", "null", "", "1_000")
    assert job.env == {"A": "~", "B": "null", "C": "", "D": "2.0"}


MISTAKES = [
    ("ranks: four", "1: ranks: input should be a valid integer, unable to parse string as an integer; got 'four'"),
    ("ranks: 0", "1: ranks: input should be greater than or equal to 1; got '0'"),
    ("ranks: 1.5", "1: ranks: input should be a valid integer, unable to parse string as an integer; got '1.5'"),
    ("ranks: true", "1: ranks: input should be a valid integer, unable to parse string as an integer; got 'true'"),
    ("\n\ntimeout: -1", "3: timeout: input should be greater than 0; got '-1'"),
    ("tag_output: 1", "1: tag_output: input should be a valid boolean; got '1'"),
    ("tag_output: yes", "1: tag_output: input should be a valid boolean; got 'yes'"),
    ("program: ''", "1: program: string should have at least 1 character; got ''"),
    ("args: {a: b}", "1: args: input should be a valid tuple; got a mapping"),
    ("env: [A, B]", "1: env: input should be a valid dictionary; got a list"),
    ("env:\n  A: 1\n  B: [x]", "3: env.B: input should be a valid string; got a list"),
    ("hosts:\n- a:2\n- [b]", "3: hosts.1: input should be a valid string; got a list"),
    ("resources: 3", "1: resources: input should be a valid dictionary or instance of Resources; got '3'"),
    ("resources:\n  nodes: 2\n  time: soon",
     "3: resources.time: expected [days-]hours:minutes:seconds above 0, as 2:00:00 or 1-12:00:00; got 'soon'"),
    ("resources: {time: 90}",
     "1: resources.time: expected [days-]hours:minutes:seconds above 0, as 2:00:00 or 1-12:00:00; got '90'"),
    ("resources: {memory_per_task: 64}",
     "1: resources.memory_per_task: expected a number and a unit of K, M, G or T, as 64G; got '64'"),
    ("resources: {queue: a b}", "1: resources.queue: expected one word of letters, digits and ._:/@+-; got 'a b'"),
    ("resources:\n  gpus_per_node: 4\n  gpus_per_task: 1",
     "3: gpus_per_node 4 and gpus_per_task 1 request the same resource: give one"),
    ("resources:\n  tasks_per_node: 4\n  gpus_per_node: 2",
     "3: 4 tasks and 2 GPUs on each node: two ranks would share a GPU, which NCCL refuses; "
     "request 2 tasks, or no GPUs"),
    ("ranks: 4\nresources:\n  nodes: 3",
     "3: 4 ranks on 3 nodes with the same number on each: the numbers do not agree"),
    ("ranks: 2\nmin_ranks: 4", "2: min_ranks=4: expected 1 to 2, the number of ranks"),
    ("resources:\n  time: 0:01:00\n  requeue: 120",
     "3: requeue 120: the job has 60 seconds; expected fewer than that"),
    ("hosts:\n- a:2\n- b:x", "3: host 'b:x': expected a name and its slots, as a:2"),
    ("hosts: a:2,b:2\nranks: 5", "2: 5 ranks on hosts with 4 slots (a:2,b:2): start fewer, or give more slots"),
    ("timeout: soon", "1: timeout: input should be a valid number, unable to parse string as a number; got 'soon'"),
    ("timeout: true", "1: timeout: input should be a valid number, unable to parse string as a number; got 'true'"),
    ("timeout: 1e400", "1: timeout: input should be a finite number; got '1e400'"),
    ("launcher: [torchrun]", "1: launcher: input should be a valid string; got a list"),
    ("launcher: torchrn",
     "1: launcher: input should be 'torchrun', 'horovodrun', 'horovodrun-mpi', 'mpirun', 'srun', 'jsrun', 'spawn' "
     "or 'python'; got 'torchrn'; did you mean 'torchrun'?"),
    ("env:\n  A: 1\n  B C: 2", "3: env: expected a variable's name, of letters, digits and underscores; got 'B C'"),
    ('program: "a\\0b"', "1: a string with a NUL byte: no program can take it as an argument"),
    ("env: &a {A: *a}", "1: lists and mappings are nested too deep, or one is an alias of itself"),
    (f"ranks: {'9' * 5000}", "1: ranks: unable to parse input string as an integer, exceeded maximum size; "
     "got '999999999999...9999999999999'"),
    ("backend: nativ",
     "1: backend: input should be 'auto', 'native', 'horovod' or 'mpi'; got 'nativ'; did you mean 'native'?"),
    ("launchr: mpirun", "1: unknown key 'launchr': did you mean 'launcher'?"),
    ("resources:\n  node: 2", "2: unknown key 'resources.node': did you mean 'nodes'?"),
    ("nodes: 2", "1: unknown key 'nodes': it belongs under resources:"),
    ("ranks: 1\nranks: 2", "2: 'ranks' is given twice, first on line 1"),
    ("program: a\nmodule: b", "2: program and module both say what to run: give one of them"),
    ("hosts: a\nhostfile: b", "2: hosts and hostfile both say where to run: give one of them"),
    ("a: b: c", "1: not YAML: mapping values are not allowed here"),
    ("ranks: 1\nenv: {A: 'b", "2: not YAML: found unexpected end of stream"),
    ("? [a]\n: 1", "1: a key is a word, not a list or a mapping"),
    ("- a", "1: a job file is a mapping, as `program: train.py` on one line and `ranks: 2` on the next"),
    ("launcher: torchrun\nbackend: mpi",
     "2: the backend mpi needs a launcher that starts MPI, not torchrun: choose horovodrun-mpi or mpirun or srun"),
    ("transport: mpi\nlauncher: spawn",
     "1: the transport mpi needs a launcher that starts MPI, not spawn: choose horovodrun-mpi or mpirun or srun"),
    ("backend: native\ntransport: mpi", "2: expected one of shm, gloo, nccl for the backend native, not mpi"),
    ("ranks: 2\nlauncher: python", "2: plain python starts one rank on this host: choose torchrun, mpirun or spawn"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_message_with_its_line(text: str, message: str) -> None:
    assert errors_of(text) == [f"job.yaml:{message}"]


def test_mpirun_without_mpi_and_launchers_of_job_scripts_alone_are_refused() -> None:
    text = "launcher: mpirun\nbackend: horovod"
    (message,) = errors_of(text, horovod_has_mpi=False)
    assert message.startswith("job.yaml:1: mpirun starts MPI, but the installed Horovod was built without it: ")
    (message,) = errors_of("backend: horovod\ntransport: mpi", horovod_has_mpi=False)
    assert message.startswith("job.yaml:2: the installed Horovod was built without MPI: ")
    for has_mpi in (True, None):
        assert loads(text, "job.yaml", horovod_has_mpi=has_mpi).backend == "horovod"
    assert loads(f"{text}\ntransport: gloo", "job.yaml", horovod_has_mpi=False).transport == "gloo"
    for name in {name for scheduler in SCHEDULERS.values() for name in scheduler.launchers}:
        assert loads(f"launcher: {name}", "job.yaml", is_script=True).launcher == name
    (message,) = errors_of("ranks: 2\nlauncher: jsrun")
    assert message.startswith("job.yaml:2: only job scripts use jsrun: add --scheduler, or choose torchrun or ")


def test_all_mistakes_of_a_file_are_reported_in_its_order_and_an_unreadable_one_is_named(tmp_path: Path) -> None:
    messages = errors_of("resources: {node: 1}\nranks: four\nlaunchr: x\n")
    assert [message.partition(" ")[0] for message in messages] == ["job.yaml:1:", "job.yaml:2:", "job.yaml:3:"]
    with pytest.raises(UsageError, match=r"nowhere\.yaml: cannot read this job file: No such file"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"job\.yaml: cannot read this job file: it is not UTF-8 text"):
        load(tmp_path / "job.yaml")


def test_aliases_that_expand_without_bound_are_refused() -> None:
    """A dozen lines would give 10**12 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (error,) = errors_of("\n".join(lines))
    assert error.startswith("job.yaml:")
    assert "more than 10000 values: do aliases repeat" in error
    assert loads("program: a.py\nargs: &a [b]\nhosts: *a\n", "job.yaml").hosts == ("b",)


def test_what_is_no_regular_file_or_too_long_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"#" * (1 << 20) + b"\n")
    for path, reason in (
        ("/dev/zero", "not a regular"),
        (tmp_path / "pipe", "not a regular"),
        (tmp_path / "long", "lon"),
    ):
        with pytest.raises(UsageError, match=f"cannot read this job file: it is {reason}"):
            load(Path(path))

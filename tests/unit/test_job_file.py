"""Job files: the values of every key, and one error message with file and line for each mistake."""

import os
from pathlib import Path
from typing import Any

import pytest

from dualdist.cli import main
from dualdist.errors import UsageError
from dualdist.launch.job import Host
from dualdist.launch.job_file import load, loads
from dualdist.launch.launchers import ALL, find_conflicts

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
  directives: [--gres=gpu:a100:4, --exclusive]
  setup: |
    module load openmpi
    source env/bin/activate
  container: image.sif
"""


def errors_of(text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        loads(text, "job.yaml")
    return str(caught.value).splitlines()


def values_of(text: str) -> dict[str, Any]:
    return loads(text, "job.yaml")[0]


def test_values_keep_their_spelling_and_an_empty_file_has_defaults() -> None:
    assert values_of("# nothing yet\n") == values_of("ranks: ~\nresources:\n") == {}
    assert values_of(WHOLE) == {
        "program": "train.py",
        "args": ("--lr", "1e-3", "--steps", "010"),
        "ranks": 4,
        "launcher": "mpirun",
        "backend": "horovod",
        "transport": "mpi",
        "hosts": (Host("a", 2), Host("b", 2)),
        "network_interface": "eth1",
        "env": {"DEBUG": "on", "LEVEL": "010", "EMPTY": ""},
        "max_restarts": 2,
        "timeout": 60.0,
        "log_dir": "logs",
        "tag_output": True,
        "resources": {
            "nodes": 2, "tasks_per_node": 2, "gpus_per_node": 0, "cpus_per_task": 8, "memory": "64G", "time": "2:00:00",
            "queue": "long", "account": "0815", "job_name": "7",
            "setup": ("module load openmpi", "source env/bin/activate"), "container": "image.sif",
            "directives": ("--gres=gpu:a100:4", "--exclusive"),
        },
    }  # fmt: skip
    job = values_of("program: train.py\nargs: [~, null, '', 1_000]\nenv: {A: ~, B: null, C: , D: 2.0}")
    assert job["args"] == ("~", "null", "", "1_000")
    assert job["env"] == {"A": "~", "B": "null", "C": "", "D": "2.0"}


WHOLE_NUMBER = "expected a whole number of 1 or more"
TIME = "expected [days-]hours:minutes:seconds above 0, as 2:00:00 or 1-12:00:00"
MISTAKES = [
    *((f"ranks: {value}", f"1: ranks '{value}': {WHOLE_NUMBER}") for value in ("four", "0", "1.5", "true")),
    (f"ranks: {'9' * 5000}", f"1: ranks '999999999999...9999999999999': {WHOLE_NUMBER}"),
    ("\n\ntimeout: -1", "3: timeout '-1': expected seconds above 0"),
    *((f"timeout: {value}", f"1: timeout '{value}': expected seconds above 0") for value in ("soon", "true", "1e400")),
    *((f"tag_output: {value}", f"1: tag_output '{value}': expected true or false") for value in ("1", "yes")),
    ("program: ''", "1: program '': expected a text"),
    ("args: {a: b}", "1: args: expected a list of texts"),
    ("args: --lr 1", "1: args '--lr 1': expected a list of texts"),
    ("env: [A, B]", "1: env: expected a mapping of variables to their values"),
    ("\nenv:\n  A: 1\n  B: [x]",
     "2: env: expected variables' names, of letters, digits and underscores, with one value each; see 'B'"),
    ("env: {B C: 2}",
     "1: env: expected variables' names, of letters, digits and underscores, with one value each; see 'B C'"),
    ("hosts:\n- a:2\n- [b]", "1: hosts: expected hosts and their slots, as a:2,b:2"),
    ("hosts:\n- a:2\n- b:x", "1: host 'b:x': expected a name and its slots, as a:2"),
    ("resources: 3", "1: resources: expected a mapping, as `nodes: 2` on an indented line"),
    ("resources:\n  nodes: 2\n  time: soon", f"3: resources.time 'soon': {TIME}"),
    ("resources:\n  partition: a\n  queue: b", "3: partition and queue are the same: give one of them"),
    ("launcher: [torchrun]", f"1: launcher: expected one of {', '.join(ALL)}; did you mean 'torchrun'?"),
    ("backend: nativ", "1: backend 'nativ': expected one of auto, native, horovod, mpi; did you mean 'native'?"),
    ("launchr: mpirun", "1: unknown key 'launchr': did you mean 'launcher'?"),
    ("resource: {}", "1: unknown key 'resource': did you mean 'resources'?"),
    ("resources:\n  node: 2", "2: unknown key 'resources.node': did you mean 'nodes'?"),
    ("nodes: 2", "1: unknown key 'nodes': it belongs under resources:"),
    ("ranks: 1\nranks: 2", "2: 'ranks' is given twice, first on line 1"),
    ("program: a\nmodule: b", "2: program and module both say what to run: give one of them"),
    ("hosts: a\nhostfile: b", "2: hosts and hostfile both say where to run: give one of them"),
    ('program: "a\\0b"', "1: a string with a NUL byte: no program can take it as an argument"),
    ("env: &a {A: *a}", "1: lists and mappings are nested too deep, or one is an alias of itself"),
    ("a: b: c", "1: not YAML: mapping values are not allowed here"),
    ("ranks: 1\nenv: {A: 'b", "2: not YAML: found unexpected end of stream"),
    ("? [a]\n: 1", "1: a key is a word, not a list or a mapping"),
    ("- a", "1: a job file is a mapping, as `program: train.py` on one line and `ranks: 2` on the next"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_message_with_its_line(text: str, message: str) -> None:
    assert errors_of(text) == [f"job.yaml:{message}"]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("launcher: torchrun\nbackend: mpi", "",
         "job.yaml:2: the backend mpi needs a launcher that starts MPI, not torchrun: choose horovodrun-mpi or mpirun"),
        ("launcher: torchrun", "--backend mpi", "run: the backend mpi needs a launcher that starts MPI"),
        ("transport: mpi\nlauncher: spawn", "", "job.yaml:1: the transport mpi needs a launcher that starts MPI, not "),
        ("backend: native\ntransport: mpi", "--launcher mpirun",
         "job.yaml:2: expected one of shm, gloo, nccl for the backend native, not mpi"),
        ("ranks: 2\nlauncher: python", "", "job.yaml:2: plain python starts one rank on this host: choose torchrun"),
        ("launcher: jsrun", "", "job.yaml:1: only job scripts use jsrun: add --scheduler, or choose torchrun or "),
        ("ranks: 2\nmin_ranks: 4", "--launcher horovodrun", "min_ranks=4: expected 1 to 2, the number of ranks"),
        ("min_ranks: 1\nmax_ranks: 4\nranks: 2", "", "-np and --max-ranks both say how many ranks run at most"),
        ("min_ranks: 1\nhost_discovery_script: ./x\nhosts: a:2", "", "--host-discovery-script says where to run, and"),
        ("max_ranks: 4", "--launcher torchrun", "job.yaml:1: max_ranks needs min_ranks and the launcher spawn"),
        ("hosts: a:2,b:2\nranks: 5", "", "5 ranks on hosts with 4 slots (a:2,b:2): start fewer, or give more slots"),
        ("resources:\n  gpus_per_node: 4\n  gpus_per_task: 1", "--scheduler slurm",
         "gpus_per_node 4 and gpus_per_task 1 request the same resource: give one"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused_at_their_place(
    text: str, words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("job.yaml").write_text(text)
    assert main(["run", "--config", "job.yaml", "--dry-run", *words.split(), "train.py"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("launcher", "transport"), [("mpirun", None), (None, "mpi")])
def test_mpi_with_a_horovod_that_was_built_without_it_is_refused(launcher: str | None, transport: str | None) -> None:
    found = [text for _, text in find_conflicts(launcher, "horovod", transport, horovod_has_mpi=False)]
    assert found
    assert "the installed Horovod was built without" in found[0]
    for has_mpi in (True, None):
        assert [*find_conflicts(launcher, "horovod", transport, horovod_has_mpi=has_mpi)] == []
    assert [*find_conflicts(launcher, "horovod", "gloo", horovod_has_mpi=False)] == []


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
    assert values_of("program: a.py\nargs: &a [b]\nhosts: *a\n")["hosts"] == (Host("b", 1),)


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

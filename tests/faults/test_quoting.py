"""What reaches ranks on other hosts: every argument as it was given, nothing run by a shell, and no secret unasked."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from faults import echo_program
from faults.echo_program import HUSH
from harness.effort import Effort
from harness.hosts import Hosts
from harness.jobs import REPORT_DIR, Launch, Outcome, collect
from harness.slurm import Slurm
from launch.job_scripts import AS_ROOT, AWAY, JSRUN, PBSDSH, stand_in, written
from launch.running import RUN, run_with_mpich

from dualdist.cli import main

ECHO = echo_program.__file__
HOSTS = ("-H", "hosta:1,hostb:1", "--network-interface", "eth0")
SECRETS = {name: f"{HUSH} {name}" for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DB_PW", "MINE", "TORCH_API_KEY")}
NAMED = {"NAMED_TOKEN": f'{HUSH} it\'s "named"'}


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Path]:
    """A file that appears where a shell runs one of the words."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists(), "a word was run by a shell"


def words(trap: Path) -> list[str]:
    """What means something to a shell; each as it is must arrive."""
    run = f"touch {trap}"
    found = [f"$({run})", f"`{run}`", f"; {run};", f"&& {run}", f"|| {run}", f"| {run}", f"\n{run}\n", f"'; {run}; '"]
    found += [f'"; {run}; "', f"'\"; {run}; \"'", f">{trap}", f"$({run}", f"\\'; {run}; \\'", f"%0a{run}", f"#\n{run}"]
    return [*found, "a b", "it's", 'say "hi"', "$HOME", "*", "~", "\\", "\t", "", "é", "!x", "{a,b}", "--x=y z", "-np"]


def check(reports: Sequence[Mapping[str, Any]], given: list[str], folder: Path | str) -> None:
    for seen in reports:
        assert seen["arguments"] == given
        assert seen["given"] == "|".join(given)
        assert seen["folder"] == str(folder)
        assert seen["named"] == NAMED["NAMED_TOKEN"]


def run_on_hosts(launch: Launch, hosts: Hosts, run: Sequence[str], trap: Path, env: Mapping[str, str] = {}) -> Outcome:
    """By `dualdist run`, with secrets around it."""
    reports = launch.directory / "reports"
    reports.mkdir()
    options = ("--env", f"GIVEN={'|'.join(words(trap))}", "--env", "NAMED_TOKEN", "--env", f"{REPORT_DIR}={reports}")
    line = [*run, *HOSTS, *options, "--json", str(launch.directory / "told.json"), ECHO, *words(trap)]
    return launch(hosts.on(0, *line), env={**hosts.env, **SECRETS, **NAMED, **env})


@pytest.mark.parametrize("launcher", ["torchrun", "spawn", "mpirun", "horovodrun", "horovodrun-mpi", "mpich"])
def test_words_arrive_on_other_hosts_as_they_are_and_secrets_only_where_they_are_named(
    launch: Launch, two_hosts: Hosts, trap: Path, launcher: str, request: pytest.FixtureRequest, effort: Effort
) -> None:
    folder = launch.directory / ("plain" if launcher == "horovodrun" else f"$(touch {trap.name}) 'and \"so on")
    folder.mkdir()
    here = Launch(launch.env, folder)
    run, env = [*RUN, "--launcher", launcher], {}
    if launcher == "mpich":
        run, env = run_with_mpich(launch, request.getfixturevalue("mpich"))
    outcome = run_on_hosts(here, two_hosts, run, trap, env)
    reports = collect(folder / "reports", 2, outcome)
    check(reports, words(trap), folder)
    assert reports[1]["secrets"] == ["NAMED_TOKEN"]
    assert HUSH not in outcome.stdout + outcome.stderr + (folder / "told.json").read_text()
    effort.count("words that mean something to a shell, on other hosts", len(words(trap)))


def test_srun_gets_no_secret_but_those_that_are_named(launch: Launch, slurm: Slurm) -> None:
    """Slurm hands on all that srun has: MINE, too, which is not called like a secret."""
    argv = [*slurm.salloc("-N2", "-n2"), *RUN, "-np", "2", "--launcher", "srun", "--env", "NAMED_TOKEN", ECHO]
    reports = launch.reports(argv, 2, env={**slurm.env, **SECRETS, **NAMED})
    assert [seen["secrets"] for seen in reports] == [["MINE", "NAMED_TOKEN"]] * 2


@pytest.mark.smoke
def test_horovodrun_gets_no_folder_that_it_would_not_quote(launch: Launch, two_hosts: Hosts, trap: Path) -> None:
    folder = launch.directory / f"$(touch {trap.name})"
    folder.mkdir()
    argv = two_hosts.on(0, *RUN, "--launcher", "horovodrun", *HOSTS, ECHO)
    outcome = Launch(launch.env, folder)(argv, env=two_hosts.env, check=False)
    assert outcome.rc == 1
    assert "unquoted to the shells of other hosts: start the job in a folder whose name" in outcome.stderr


@pytest.mark.smoke("torchrun", "mpirun")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn", "mpirun", "horovodrun", "python"])
def test_no_secret_is_printed_by_a_dry_run(
    launch: Launch, launcher: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**SECRETS, **NAMED}.items():
        monkeypatch.setenv(name, value)
    given = ["--env", "NAMED_TOKEN", "--env", f"OTHER_PASSWORD={HUSH}", "--env", "PLAIN=seen"]
    assert main(["run", "--launcher", launcher, "--dry-run", "--json", "-", *given, ECHO]) == 0
    said = capfd.readouterr().out
    assert HUSH not in said
    assert "PLAIN=seen" in said
    assert "NAMED_TOKEN=***" in said


@pytest.mark.smoke("bench startup --dry-run")
@pytest.mark.parametrize("command", ["doctor", "doctor --json -", "compare --dry-run", "bench startup --dry-run"])
def test_no_secret_is_printed_by_other_commands(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**SECRETS, **NAMED}.items():
        monkeypatch.setenv(name, value)
    main(command.split())
    said = capfd.readouterr()
    assert said.out
    assert HUSH not in said.out + said.err


@pytest.mark.smoke
def test_what_is_still_running_is_told_without_secrets(launch: Launch) -> None:
    script = launch.directory / "hold.py"
    script.write_text("import subprocess\nsubprocess.run(['sleep', '60', ])\n")
    argv = ["env", f"A_TOKEN={HUSH}", *RUN, "--launcher", "spawn", "--timeout", "2"]
    given = ["--env", "A_TOKEN", str(script), f"PASSWORD={HUSH}"]
    outcome = launch([*argv, *given], check=False)
    assert "still running: " in outcome.stderr
    assert HUSH not in outcome.stderr, str(outcome)


NAMES = ["a b", "$(touch {})", "`touch {}`", "a;touch {}", "a'b", 'a"b', "a|b", "a&b", "a>b", "-oProxyCommand=touch {}"]


@pytest.mark.smoke("a b", "$(touch {})", "-oProxyCommand=touch {}")
@pytest.mark.parametrize("name", [*NAMES, "a\\b", "a*", "~", "é", "%h", "!x", "{a}", "a=b", "[a]"])
def test_a_host_of_a_strange_name_is_refused_wherever_it_is_named(
    tmp_path: Path, trap: Path, name: str, capsys: pytest.CaptureFixture[str], effort: Effort
) -> None:
    name = name.replace("{}", str(trap))
    hostfile, job = tmp_path / "hosts", tmp_path / "job.yaml"
    hostfile.write_text(f"{name} slots=2\n{name}:2\n")
    job.write_text(f"program: {ECHO}\nhosts:\n- {name!r}\n")
    for where in (("-H", f"{name}:2,b:2"), ("--hostfile", str(hostfile)), ("--config", str(job))):
        for how in ((), ("--scheduler", "ssh")):
            assert main(["run", *where, *how, ECHO]) == 1
            assert capsys.readouterr().err.startswith("dualdist run: ")
    effort.count("host names that mean something to a shell")


def script_of(launch: Launch, trap: Path, *options: str, needs: Mapping[str, str] = {}) -> tuple[Path, Path]:
    """A job script that carries the words, and where its ranks report."""
    reports = launch.directory / "reports"
    reports.mkdir()
    given = {"GIVEN": "|".join(words(trap)), REPORT_DIR: str(reports), "PYTHONPATH": launch.env["PYTHONPATH"]}
    env = [word for name, value in {**given, **needs}.items() for word in ("--env", f"{name}={value}")]
    env += ["--env", "NAMED_TOKEN"]
    with_token = Launch({**launch.env, **NAMED, **SECRETS}, launch.directory)
    path = written(with_token, *options, *env, program=(ECHO, *words(trap)))
    assert HUSH not in path.read_text()
    return path, reports


@pytest.mark.smoke("mpirun")
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_a_script_for_a_workstation_hands_words_on_as_they_are(launch: Launch, trap: Path, launcher: str) -> None:
    path, reports = script_of(launch, trap, "--scheduler", "workstation", "-np", "2", "--launcher", launcher)
    outcome = launch(["bash", str(path)], env={**AS_ROOT, **NAMED, **SECRETS})
    check(collect(reports, 2, outcome), words(trap), launch.directory)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_a_script_for_hosts_hands_words_on_as_they_are(
    launch: Launch, two_hosts: Hosts, trap: Path, launcher: str
) -> None:
    setup = ("--setup", f"export PATH={shlex.quote(two_hosts.env['PATH'])}")
    asked = ("--scheduler", "ssh", "-H", "hosta:1,hostb:1", "--launcher", launcher, *setup)
    path, reports = script_of(launch, trap, *asked, needs={"HOROVOD_GLOO_IFACE": "eth0"})
    env = {**two_hosts.env, **AS_ROOT, **AWAY, **NAMED, **SECRETS}
    seen = collect(reports, 2, launch(two_hosts.on(0, "bash", str(path)), env=env))
    check(seen, words(trap), launch.directory)
    its_own = {"OMPI_ARGV"}  # mpirun's command line, with the value that was named
    assert {*seen[1]["secrets"]} - its_own == {"NAMED_TOKEN"}


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpirun", "horovodrun"])
def test_a_script_for_slurm_hands_words_on_as_they_are(
    launch: Launch, slurm: Slurm, trap: Path, launcher: str, effort: Effort
) -> None:
    if launcher != effort("srun", launcher):
        pytest.skip("only with --long")
    asked = ("--scheduler", "slurm", "--tasks-per-node", "2", "--launcher", launcher)
    path, reports = script_of(launch, trap, *asked)
    outcome = launch([*slurm.sbatch(), str(path)], env={**slurm.env, **AS_ROOT, **NAMED})
    check(collect(reports, 2, outcome), words(trap), launch.directory)


def test_a_script_for_pbs_hands_words_on_as_they_are(launch: Launch, trap: Path) -> None:
    asked = ("--scheduler", "pbs", "--nodes", "2", "--time", "1:00:00")
    first = stand_in(launch, "pbsdsh", PBSDSH)
    setup = ("--setup", f"export PATH={shlex.quote(first['PATH'])}")
    path, reports = script_of(launch, trap, *asked, *setup)
    (launch.directory / "bin" / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} node0 node1\n")
    (launch.directory / "nodes").write_text("a\nb\n")
    folder = launch.directory
    env = {"PBS_NODEFILE": str(folder / "nodes"), "PBS_JOBID": "1.pbs", "PBS_O_WORKDIR": str(folder)}
    outcome = launch(["bash", str(path)], env={**env, **first, **NAMED})
    check(collect(reports, 2, outcome), words(trap), launch.directory)


@pytest.mark.smoke
def test_a_script_for_lsf_hands_words_on_as_they_are(launch: Launch, trap: Path) -> None:
    path, reports = script_of(launch, trap, "--scheduler", "lsf", "--tasks-per-node", "2")
    env = {"LS_SUBCWD": str(launch.directory), "LSB_JOBID": "7", **stand_in(launch, "jsrun", JSRUN), **NAMED}
    check(collect(reports, 2, launch(["bash", str(path)], env=env)), words(trap), launch.directory)

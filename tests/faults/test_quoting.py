"""Arguments reach ranks on other hosts unchanged: no shell runs them, and only named secrets are passed."""

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
from launch.running import AS_ROOT, AWAY, JSRUN, PBSDSH, RUN, run_with_mpich, stand_in, written

from dualdist.cli import main

ECHO = echo_program.__file__
HOSTS = ("-H", "hosta:1,hostb:1", "--network-interface", "eth0")
SECRETS = {name: f"{HUSH} {name}" for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DB_PW", "MINE", "TORCH_API_KEY")}
NAMED = {"NAMED_TOKEN": f'{HUSH} it\'s "named"'}


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Path]:
    """A file that appears if a shell runs one of the words."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists(), "a word was run by a shell"


def words(trap: Path) -> list[str]:
    """Return words that mean something to a shell."""
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
    """Run the echo program on two hosts by `dualdist run`, with secrets in the environment."""
    reports = launch.directory / "reports"
    reports.mkdir()
    options = ("--env", f"GIVEN={'|'.join(words(trap))}", "--env", "NAMED_TOKEN", "--env", f"{REPORT_DIR}={reports}")
    line = [*run, *HOSTS, *options, "--json", str(launch.directory / "report.json"), ECHO, *words(trap)]
    return launch(hosts.on(0, *line), env={**hosts.env, **SECRETS, **NAMED, **env})


@pytest.mark.parametrize("launcher", ["torchrun", "spawn", "mpirun", "horovodrun", "horovodrun-mpi", "mpich"])
def test_words_arrive_unchanged_on_other_hosts_and_secrets_only_if_named(
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
    assert HUSH not in outcome.stdout + outcome.stderr + (folder / "report.json").read_text()
    effort.count("words that mean something to a shell, on other hosts", len(words(trap)))


def test_srun_passes_only_named_secrets(launch: Launch, slurm: Slurm) -> None:
    """And MINE, whose name is not that of a secret: Slurm passes the whole environment of srun."""
    argv = [*slurm.salloc("-N2", "-n2"), *RUN, "-np", "2", "--launcher", "srun", "--env", "NAMED_TOKEN", ECHO]
    reports = launch.reports(argv, 2, env={**slurm.env, **SECRETS, **NAMED})
    assert [seen["secrets"] for seen in reports] == [["MINE", "NAMED_TOKEN"]] * 2


@pytest.mark.smoke
def test_a_folder_that_horovodrun_would_not_quote_is_refused(launch: Launch, two_hosts: Hosts, trap: Path) -> None:
    folder = launch.directory / f"$(touch {trap.name})"
    folder.mkdir()
    argv = two_hosts.on(0, *RUN, "--launcher", "horovodrun", *HOSTS, ECHO)
    outcome = Launch(launch.env, folder)(argv, env=two_hosts.env, check=False)
    assert outcome.rc == 1
    assert "unquoted to the shells of other hosts: start the job in a folder whose name" in outcome.stderr


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **NAMED}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.smoke("torchrun", "mpirun")
@pytest.mark.parametrize("launcher", ["torchrun", "spawn", "mpirun", "horovodrun", "python"])
@pytest.mark.usefixtures("secrets")
def test_no_secret_is_printed_by_a_dry_run(launcher: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--env", "NAMED_TOKEN", "--env", f"OTHER_PASSWORD={HUSH}", "--env", "PLAIN=seen"]
    assert main(["run", "--launcher", launcher, "--dry-run", "--json", "-", *given, ECHO]) == 0
    printed = capfd.readouterr().out
    assert HUSH not in printed
    assert "PLAIN=seen" in printed
    assert "NAMED_TOKEN=***" in printed


COMMANDS = ["doctor", "doctor --json -", "doctor --explain-env", "compare --dry-run", "bench startup --dry-run"]


@pytest.mark.smoke("doctor --explain-env", "bench startup --dry-run")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("secrets")
def test_no_secret_is_printed_by_other_commands(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    main(command.split())
    printed = capfd.readouterr()
    assert printed.out
    assert HUSH not in printed.out + printed.err


@pytest.mark.smoke
def test_the_list_of_running_commands_has_no_secrets(launch: Launch) -> None:
    script = launch.write("hold.py", "import subprocess\nsubprocess.run(['sleep', '60', ])\n")
    argv = ["env", f"A_TOKEN={HUSH}", *RUN, "--launcher", "spawn", "--timeout", "2"]
    given = ["--env", "A_TOKEN", script, f"PASSWORD={HUSH}"]
    outcome = launch([*argv, *given], check=False)
    assert "still running: " in outcome.stderr
    assert HUSH not in outcome.stderr, str(outcome)


NAMES = ["a b", "$(touch {})", "`touch {}`", "a;touch {}", "a'b", 'a"b', "a|b", "a&b", "a>b", "-oProxyCommand=touch {}"]


@pytest.mark.smoke("a b", "$(touch {})", "-oProxyCommand=touch {}")
@pytest.mark.parametrize("name", [*NAMES, "a\\b", "a*", "~", "é", "%h", "!x", "{a}", "a=b", "[a]"])
def test_a_host_name_with_shell_syntax_is_refused_everywhere(
    tmp_path: Path, trap: Path, name: str, capsys: pytest.CaptureFixture[str], effort: Effort
) -> None:
    name = name.replace("{}", str(trap))
    hostfile, job = tmp_path / "hosts", tmp_path / "job.yaml"
    hostfile.write_text(f"{name} slots=2\n{name}:2\n")
    job.write_text(f"program: {ECHO}\nhosts:\n- {name!r}\n")
    for where in (("-H", f"{name}:2,b:2"), ("--hostfile", str(hostfile)), ("--config", str(job))):
        for how in ((), ("--scheduler", "ssh")):
            assert main(["run", *where, *how, ECHO]) == 2
            assert capsys.readouterr().err.startswith("dualdist run: ")
    effort.count("host names that mean something to a shell")


def check_script(
    launch: Launch,
    trap: Path,
    *options: str,
    argv: Sequence[str] = ("bash",),
    env: Mapping[str, str] = {},
    needs: Mapping[str, str] = {},
) -> list[dict[str, Any]]:
    """Write a job script with the words, run it by argv, and return the checked reports of its two ranks."""
    reports = launch.directory / "reports"
    reports.mkdir()
    given = {"GIVEN": "|".join(words(trap)), REPORT_DIR: str(reports), "PYTHONPATH": launch.env["PYTHONPATH"]}
    variables = [word for name, value in {**given, **needs}.items() for word in ("--env", f"{name}={value}")]
    with_token = Launch({**launch.env, **NAMED, **SECRETS}, launch.directory)
    path = written(with_token, *options, *variables, "--env", "NAMED_TOKEN", program=(ECHO, *words(trap)))
    assert HUSH not in Path(path).read_text()
    outcome = launch([*argv, path], env={**AS_ROOT, **env, **NAMED})
    found = collect(reports, 2, outcome)
    check(found, words(trap), launch.directory)
    return found


def export_path(env: Mapping[str, str]) -> tuple[str, str]:
    return "--setup", f"export PATH={shlex.quote(env['PATH'])}"


@pytest.mark.smoke("mpirun")
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_a_script_for_a_workstation_passes_words_unchanged(launch: Launch, trap: Path, launcher: str) -> None:
    check_script(launch, trap, "--scheduler", "workstation", "-np", "2", "--launcher", launcher, env=SECRETS)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
def test_a_script_for_hosts_passes_words_unchanged(launch: Launch, two_hosts: Hosts, trap: Path, launcher: str) -> None:
    options = ("--scheduler", "ssh", "-H", "hosta:1,hostb:1", "--launcher", launcher, *export_path(two_hosts.env))
    env = {**two_hosts.env, **AS_ROOT, **AWAY, **SECRETS}
    needs = {"HOROVOD_GLOO_IFACE": "eth0"}
    seen = check_script(launch, trap, *options, argv=two_hosts.on(0, "bash"), env=env, needs=needs)
    # mpirun's command line, with the value that was named, is in a variable of its own.
    assert {*seen[1]["secrets"]} - {"OMPI_ARGV"} == {"NAMED_TOKEN"}


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpirun", "horovodrun"])
def test_a_script_for_slurm_passes_words_unchanged(
    launch: Launch, slurm: Slurm, trap: Path, launcher: str, effort: Effort
) -> None:
    effort.require_long(unless=launcher == "srun")
    options = ("--scheduler", "slurm", "--tasks-per-node", "2", "--launcher", launcher)
    check_script(launch, trap, *options, argv=slurm.sbatch(), env=slurm.env)


def test_a_script_for_pbs_passes_words_unchanged(launch: Launch, trap: Path) -> None:
    folder, first = launch.directory, stand_in(launch, "pbsdsh", PBSDSH)
    launch.write("bin/hosts", f"127.0.0.1 localhost {socket.gethostname()} node0 node1\n")
    env = {"PBS_NODEFILE": launch.write("nodes", "a\nb\n"), "PBS_JOBID": "1.pbs", "PBS_O_WORKDIR": str(folder), **first}
    check_script(launch, trap, "--scheduler", "pbs", "--nodes", "2", "--time", "1:00:00", *export_path(first), env=env)


@pytest.mark.smoke
def test_a_script_for_lsf_passes_words_unchanged(launch: Launch, trap: Path) -> None:
    env = {"LS_SUBCWD": str(launch.directory), "LSB_JOBID": "7", **stand_in(launch, "jsrun", JSRUN)}
    check_script(launch, trap, "--scheduler", "lsf", "--tasks-per-node", "2", env=env)

"""Secrets: recognised by name or form, passed to other hosts only if listed, and never shown."""

import json
import subprocess
from pathlib import Path

import pytest

from dualdist.cli import main
from dualdist.cli.run import shell_line
from dualdist.launch import env_defaults
from dualdist.launch.job import Command, Site
from dualdist.launch.schedulers import ScriptRequest, job_script
from dualdist.launch.ssh import remote_python_argv, wrap_remote
from dualdist.utils.control_channel import CONTROL_VARIABLE
from dualdist.utils.redaction import HIDDEN, is_secret, make_redactor, redact_command, redact_json, redact_variables

SECRETS = (
    *("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "WANDB_APIKEY", "HF_TOKEN", "DB_PASSWORD", "db_passwd", "DB_PW"),
    *("SSH_PRIVATE_KEY", "HOROVOD_SECRET_KEY", "PMI_SHARED_SECRET", "PGPASSWORD", "MY_PASSPHRASE"),
)
OTHERS = ("PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "NCCL_IB_PKEY", "KEYBOARD", "PATTERN")


def test_redacted_variables_lack_the_values_of_secrets_which_are_recognised_by_name() -> None:
    assert [name for name in (*SECRETS, *OTHERS) if is_secret(name)] == list(SECRETS)
    assert redact_variables({"HF_TOKEN": "x", "PATH": "y"}) == {"HF_TOKEN": "***", "PATH": "y"}
    argv = ["env", "HF_TOKEN=x y", "A=HF_TOKEN=b", "sh", "-c", "A=\"b\" DB_PW='c d' DB_PW=e python --x=y"]
    shown = ["env", "HF_TOKEN=***", "A=HF_TOKEN=b", "sh", "-c", 'A="b" DB_PW=*** DB_PW=*** python --x=y']
    assert redact_command(argv) == shown


@pytest.mark.parametrize("option", ["--password", "--token", "--api-key", "--db-pw", "-token"])
def test_the_value_of_a_secret_option_is_redacted(option: str) -> None:
    for value in ("abc", "c2VjcmV0=", "abcDEF123==", "user=pw", "PATH=/x"):
        shown = redact_command([f"{option}={value}"])[0]
        assert value not in shown
        assert shown.endswith("***")


@pytest.mark.parametrize("option", ["--password", "--api-key", "--db-pw", "-token"])
def test_a_secret_option_hides_the_next_word_also_in_a_command_for_a_shell(option: str) -> None:
    assert redact_command(["x.py", option, "hush", "--lr", "1"]) == ["x.py", option, "***", "--lr", "1"]
    assert redact_command(["x.py", option, "--lr", "1"]) == ["x.py", option, "--lr", "1"]
    line = f"exec python x.py {option} 'hush hush' --lr 1 {option} hush; ls --key-word no -k-token"
    shown = f"exec python x.py {option} *** --lr 1 {option} ***; ls --key-word no -k-token"
    assert redact_command(["sh", "-c", line]) == ["sh", "-c", shown]


def test_a_dry_run_hides_secret_options_of_the_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for options in (["-np", "2"], ["-np", "2", "--launcher", "spawn"], ["--scheduler", "slurm", "-np", "2"]):
        assert main(["run", "--dry-run", *options, "train.py", "--password", "hush", "--lr", "1"]) == 0
        shown = capsys.readouterr().out
        assert "hush" not in shown
        assert "--lr 1" in shown


@pytest.mark.parametrize(
    "name", [*SECRETS, *(f"{prefix}{name}" for prefix in ("TORCH_", "DUALDIST_") for name in SECRETS)]
)
def test_no_secret_goes_to_another_host_unasked(name: str) -> None:
    environ = {name: "hush", "OMP_PLACES": "cores", "HOME": "/h", "A B": "c", "OMP_$(id)": "d"}
    options = {"threads": None, "interface": None, "has_hosts": True}
    forwarded = env_defaults.rank_variables(environ, {}, **options)  # type: ignore[arg-type]
    assert forwarded == {"OMP_PLACES": "cores"}
    assert env_defaults.rank_variables(environ, {name: "asked"}, **options)[name] == "asked"  # type: ignore[arg-type]
    assert env_defaults.launcher_variables(environ) == {"HOME": "/h"}


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "lsf"])
def test_a_job_script_asks_pbs_for_named_variables(scheduler: str) -> None:
    """PBS alone hands none on unasked."""
    text = job_script(scheduler, ScriptRequest(("x.py",), "mpirun", handed_on=("HF_TOKEN", "B")))
    assert ("#PBS -v HF_TOKEN,B\n" in text) == (scheduler == "pbs")


def test_a_job_script_without_an_inherited_variable_does_not_start() -> None:
    request = ScriptRequest(("x.py",), "torchrun", setup=("echo started",), handed_on=("HF_TOKEN",))
    text = job_script("workstation", request)
    for given, message in (({}, "HF_TOKEN: is not set where this was submitted"), ({"HF_TOKEN": ""}, "torchrun: ")):
        options = {"env": {"PATH": "", **given}, "capture_output": True, "text": True, "timeout": 30}
        done = subprocess.run(["/bin/bash"], input=text, **options)
        assert done.returncode != 0
        assert message in done.stderr
        assert ("started" in done.stdout) == bool(given)


def test_a_job_script_recognises_secrets_by_the_same_names() -> None:
    names = [f"TORCH_{name}" for name in (*SECRETS, *OTHERS, "KEY", "KEYS", "MAX_TOKENS", "PASS", "PASSES", "PAT")]
    environ = dict.fromkeys(names, "hush")
    text = job_script("ssh", ScriptRequest(("x.py",), "mpirun", hosts=("a",)))
    selection = text[text.index("secret=") : text.index("env -i")]
    line = f'{selection}printf "%s\\n" "${{kept[@]}}"'
    done = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, check=True)
    kept = {word.partition("=")[0] for word in done.stdout.splitlines()}
    assert kept & {*environ} == {name for name in names if not is_secret(name)}


def test_secrets_are_on_no_command_line_of_another_host_but_in_its_input() -> None:
    """All users of both hosts see command lines."""
    site = Site("/v/python", {}, "/v", folder="/here")
    built = wrap_remote(
        Command(("python", "x.py"), {"HF_TOKEN": "hush", CONTROL_VARIABLE: "hush:1:a", "A": "b"}, host="n1"), site
    )
    assert json.loads(built.stdin) == {"HF_TOKEN": "hush", CONTROL_VARIABLE: "hush:1:a"}
    assert "hush" not in " ".join(built.argv)
    assert built.argv[-1].endswith("exec env A=b /v/python -m dualdist.launch.ssh --env-from-stdin python x.py")
    assert "-n" not in built.argv, "ssh would not read it"
    plain = wrap_remote(Command(("python", "x.py"), {"A": "b"}, host="n1"), site)
    assert (plain.stdin, plain.argv[1]) == ("", "-n")
    assert "hush" not in " ".join(remote_python_argv("n1", site, {"HF_TOKEN": "hush", "A": "b"}, ()))
    built = Command(("cat",), stdin='{"HF_TOKEN": "it\'s"}')
    done = subprocess.run(["sh", "-c", shell_line(built)], capture_output=True, text=True, check=True, timeout=30)
    assert json.loads(done.stdout) == {"HF_TOKEN": "it's"}


def test_a_dry_run_of_a_job_script_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scheduler", "slurm", "--env", "HF_TOKEN=hush", "--env", "A=b", "train.py"]
    assert main(["run", "--dry-run", *words]) == 0
    shown = capsys.readouterr().out
    assert ("hush" in shown, "'HF_TOKEN=***'" in shown, "A=b" in shown) == (False, True, True)
    assert main(["run", *words]) == 0
    assert "HF_TOKEN=hush" in capsys.readouterr().out, "who wants the script gets it whole"


@pytest.mark.parametrize("secret", ["hush", "hush it's", 'say "hush"', "a\nhush", "$(hush) 'a' \"b\""])
def test_a_secret_in_a_remote_shell_line_is_redacted_whole(secret: str) -> None:
    built = Command(("python", "x.py"), {"HF_TOKEN": secret, "A": "b c"}, host="n1")
    shown = redact_command(wrap_remote(built, Site("/v/python", {}, "/v")).argv)
    assert "hush" not in " ".join(shown)
    assert "A=b c" in " ".join(shown)


VALUES = {name: f"hush-{number}" for number, name in enumerate(SECRETS)}
PLAIN = {"MASTER_ADDR": "n1", "TOKENIZERS_PARALLELISM": "false", "PATH": "/bin", "KEYBOARD": "german", "PMI_KEY": "no"}


def test_values_of_secret_variables_are_redacted_in_text_and_json() -> None:
    redact = make_redactor(VALUES | PLAIN)
    for value in VALUES.values():
        assert redact(f"rank 0 printed {value}, and /a/{value}/b") == f"rank 0 printed {HIDDEN}, and /a/{HIDDEN}/b"
    redact = make_redactor({"A_TOKEN": "abcd", "B_TOKEN": "abcdefgh"})
    assert redact("abcdefgh abcd") == f"{HIDDEN} {HIDDEN}", "a secret that begins with another one"
    data = {"a": ["hush-1", {"b": "x hush-1"}], "n": 3, "AUTH_TOKEN": "zz", "none": None}
    told = redact_json(data, make_redactor({"A_SECRET": "hush-1"}))
    assert told == {"a": [HIDDEN, {"b": f"x {HIDDEN}"}], "n": 3, "AUTH_TOKEN": HIDDEN, "none": None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pip install --index-url https://user:pw@host/simple",
         f"pip install --index-url https://{HIDDEN}@host/simple"),
        ("git+ssh://git@host/a", f"git+ssh://{HIDDEN}@host/a"),
        ("API_KEY=abc", f"API_KEY={HIDDEN}"),
        ("env MY_TOKEN='abc b' python", f"env MY_TOKEN={HIDDEN} python"),
        ('{"password": "abc y"}', f'{{"password": {HIDDEN}}}'),
        ("a:\n  password: abc\n  b: c", f"a:\n  password: {HIDDEN}\n  b: c"),
        ("Authorization: Bearer abc.def", f"Authorization: {HIDDEN}"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", HIDDEN),
        ("hf_0123456789abcdefghij", HIDDEN),
        ("key AKIAIOSFODNN7EXAMPLE", f"key {HIDDEN}"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_", HIDDEN),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\nnext", f"{HIDDEN}\nnext"),
    ],
)  # fmt: skip
def test_text_that_looks_like_a_secret_is_redacted(text: str, expected: str) -> None:
    assert make_redactor({})(text) == expected


def test_other_text_is_kept() -> None:
    for text in (
        "type: pip install --no-deps torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu",
        "host 'a' cannot be reached by ssh: it requires a password: put your public key there",
        "SLURM_NTASKS=4, but this process is no task of a Slurm step",
        "KeyError: 'weight'",
        "TOKENIZERS_PARALLELISM=false MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
        "its key is unknown: run `ssh a`",
        "a@b is an address",
    ):
        assert make_redactor(PLAIN)(text) == text

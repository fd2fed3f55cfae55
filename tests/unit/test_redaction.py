"""Redaction of the doctor's output: secrets are removed, other text is kept."""

from __future__ import annotations

import json

import pytest
from doctor_facts import RECORDS, diagnosis

from dualdist.backends.registry import availability
from dualdist.cli.doctor import Painter, format_diagnosis, format_explanation
from dualdist.doctor import to_json
from dualdist.doctor.diagnosis import detect_topology
from dualdist.doctor.explain import explain
from dualdist.utils.redaction import HIDDEN, make_redactor, redact_json

SECRETS = {
    "HOROVOD_SECRET_KEY": "hush-1",
    "PMI_SHARED_SECRET": "hush-2",
    "AWS_SECRET_ACCESS_KEY": "hush-3",
    "HF_TOKEN": "hush-4",
    "WANDB_API_KEY": "hush-5",
    "WANDB_APIKEY": "hush-6",
    "PGPASSWORD": "hush-7",
    "MY_PASSPHRASE": "hush-8",
    "DB_PASSWD": "hush-9",
}
PLAIN = {
    "MASTER_ADDR": "n1",
    "TOKENIZERS_PARALLELISM": "false",
    "PATH": "/usr/bin",
    "KEYBOARD": "german",
    "PMI_KEY": "no",
}


@pytest.mark.parametrize("name", SECRETS)
def test_the_value_of_a_secret_variable_is_redacted_everywhere(name: str) -> None:
    redact = make_redactor(SECRETS | PLAIN)
    told = redact(f"rank 0 printed {SECRETS[name]}, and /a/{SECRETS[name]}/b")
    assert told == f"rank 0 printed {HIDDEN}, and /a/{HIDDEN}/b"


def test_a_secret_with_another_as_prefix_is_redacted_whole() -> None:
    redact = make_redactor({"A_TOKEN": "abcd", "B_TOKEN": "abcdefgh"})
    assert redact("abcdefgh abcd") == f"{HIDDEN} {HIDDEN}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "pip install --index-url https://user:pw@host/simple",
            f"pip install --index-url https://{HIDDEN}@host/simple",
        ),
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
)
def test_text_that_looks_like_a_secret_is_redacted(text: str, expected: str) -> None:
    assert make_redactor({})(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "type: pip install --no-deps torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu",
        "host 'a' cannot be reached by ssh: it requires a password: put your public key there",
        "SLURM_NTASKS=4, but this process is no task of a Slurm step",
        "KeyError: 'weight'",
        "TOKENIZERS_PARALLELISM=false MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
        "its key is unknown: run `ssh a`",
        "a@b is an address",
    ],
)
def test_other_text_is_kept(text: str) -> None:
    assert make_redactor(PLAIN)(text) == text


def test_json_is_redacted_in_every_string_and_under_secret_names() -> None:
    data = {"a": ["hush-1", {"b": "x hush-1"}], "n": 3, "AUTH_TOKEN": "zz", "none": None}
    told = redact_json(data, make_redactor({"A_SECRET": "hush-1"}))
    assert told == {"a": [HIDDEN, {"b": f"x {HIDDEN}"}], "n": 3, "AUTH_TOKEN": HIDDEN, "none": None}


def test_output_never_names_unrelated_variables() -> None:
    """For every launcher, even if a launcher's variable contains a secret."""

    class Nowhere:
        def isatty(self) -> bool:
            return False

    paint = Painter(Nowhere(), {})
    for rows in RECORDS.values():
        environ = rows[0]["env"] | SECRETS
        told = diagnosis(environ)
        explanation = explain(environ, detect_topology(environ), availability(told.versions, None), has_gpu=False)
        said = [json.dumps(to_json(told)), *format_diagnosis(told, paint), *format_explanation(explanation, paint)]
        assert "hush" not in "\n".join(said)
    environ = {"DUALDIST_RENDEZVOUS": "tcp://me:hush-1@n1:7", **RECORDS["torchrun"][0]["env"]}
    explanation = explain(environ, detect_topology(environ), availability(told.versions, None), has_gpu=False)
    assert "hush-1" not in "\n".join(map(make_redactor({}), format_explanation(explanation, paint)))

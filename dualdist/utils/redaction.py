"""What is secret: variables that are told by their names. These, and what looks like a secret, are shown to nobody."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

HIDDEN = "***"
# What the name of a variable has in it that holds a secret; the shell of a job script reads this, too.
SECRET = (
    "SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|(API|ACCESS|PRIVATE)_?KEY|TOKEN(_|$)"
    "|(^|_)KEY$|(^|_)(PASS|PW|PAT)(_|$)|_PWD$"
)
SECRET_NAME = re.compile(SECRET, re.IGNORECASE)
VARIABLE = re.compile(r"[A-Za-z_]\w*")
OPTION = re.compile(r"--?[\w-]+=(?=[A-Za-z_]\w*=)")  # whose value is a setting: --env=NAME=value
# Shorter values are words that may stand in any text.
LEAST_LENGTH = 4
QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
# Settings in a text: a name, what joins it to its value, and the value.
SETTINGS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"""(?P<before>'(?P<name>\w+)=)(?:[^']|'"'"')*(?=')""",  # as shlex.quote() has name=value
        r"""(?P<before>"(?P<name>\w+)=)(?:\\.|[^"\\])*(?=")""",
        rf"(?P<before>\b(?P<name>\w+)=)(?:{QUOTED})",
        r"""(?P<before>\b(?P<name>\w+)=)[^\s'";&|]+""",
        rf"""(?P<before>(?P<quote>['"])(?P<name>\w+)(?P=quote)\s*:\s*)(?:{QUOTED}|[^\s'",;]+)""",  # JSON
        rf"""(?P<before>^\s*(?P<name>\w+):[ \t]+)(?:{QUOTED}|[^\s'",;]+)""",  # YAML; a sentence may have a colon, too
    )
)
AUTHORIZATION = re.compile(r"""(?i)\b(authorization:\s*)(?:(?:bearer|basic)\s+)?[^\s'",;]+""")
# The well-known beginnings of tokens: GitHub, GitLab, Hugging Face, Slack, OpenAI and its kin, AWS, PyPI, JSON's.
TOKEN = re.compile(
    r"\b(?:gh[pousr]_\w{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{16,}|xox[abprs]-[\w-]{10,}|sk-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|pypi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
USER_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@]+@")
KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether a variable is called as those are that hold a secret."""
    return SECRET_NAME.search(name) is not None


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, as they may be shown."""
    return {name: HIDDEN if is_secret(name) else redact_text(value) for name, value in variables.items()}


def redact_command(argv: Iterable[str]) -> list[str]:
    """A command line as it may be shown: without the values of secrets, be they in a line for a shell."""
    return [_redact_word(word) for word in argv]


def _redact_word(word: str) -> str:
    option = OPTION.match(word)
    if option and not is_secret(option[0].strip("-=").replace("-", "_")):
        return option[0] + _redact_word(word[option.end() :])
    name, equals, _ = word.partition("=")
    is_whole = equals and VARIABLE.fullmatch(name) and is_secret(name)  # whatever blanks and quotes the value has
    return f"{name}={HIDDEN}" if is_whole else redact_text(word)


def redact_text(text: str) -> str:
    """The text without what looks like a secret."""
    text = KEY_BLOCK.sub(HIDDEN, text)
    for setting in SETTINGS:
        text = setting.sub(lambda found: f"{found['before']}{HIDDEN}" if is_secret(found["name"]) else found[0], text)
    text = AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    text = TOKEN.sub(HIDDEN, text)
    return USER_IN_URL.sub(rf"\1{HIDDEN}@", text)


def make_redactor(environ: Mapping[str, str]) -> Callable[[str], str]:
    """Hides the values of variables that are secret by their names, wherever they stand, and what looks secret."""
    values = {value for name, value in environ.items() if is_secret(name) and len(value.strip()) >= LEAST_LENGTH}
    if not values:
        return redact_text
    # The longest first, as one secret may begin with another one.
    known = re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True))))
    return lambda text: redact_text(known.sub(HIDDEN, text))


def redact_json(data: Any, redact: Callable[[str], str]) -> Any:
    """Data as JSON has it, every text in it redacted."""
    if isinstance(data, str):
        return redact(data)
    if isinstance(data, Mapping):
        return {key: HIDDEN if _is_secret(key, value) else redact_json(value, redact) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [redact_json(each, redact) for each in data]
    return data


def _is_secret(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, str) and is_secret(key)

"""Redaction of secrets: values of variables with telling names, and text that looks like a secret."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

HIDDEN = "***"
# Pattern of the names of secret variables; also used by job scripts' shell code.
SECRET = (
    "SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|(API|ACCESS|PRIVATE)_?KEY|TOKEN(_|$)"
    "|(^|_)KEY$|(^|_)(PASS|PW|PAT)(_|$)|_PWD$"
)
SECRET_NAME = re.compile(SECRET, re.IGNORECASE)
VARIABLE = re.compile(r"[A-Za-z_]\w*")
OPTION = re.compile(r"--?[\w-]+=(?=[A-Za-z_]\w*=)")  # an option whose value is a setting: --env=NAME=value
# Shorter values may be common words.
LEAST_LENGTH = 4
QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
# An option whose value is the next word, alone and in a command for a shell.
OPTION_NAME = re.compile(r"--?(?P<name>[A-Za-z][\w-]*)")
OPTION_AND_VALUE = re.compile(
    rf"""(?P<before>(?<![^\s'"])--?(?P<name>[A-Za-z][\w-]*)[ \t]+)(?:{QUOTED}|[^\s'";&|-][^\s'";&|]*)"""
)
# Settings in text: a name, a separator and a value.
SETTINGS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"""(?P<before>'(?P<name>\w+)=)(?:[^']|'"'"')*(?=')""",  # what shlex.quote() makes of name=value
        r"""(?P<before>"(?P<name>\w+)=)(?:\\.|[^"\\])*(?=")""",
        rf"(?P<before>\b(?P<name>\w+)=)(?:{QUOTED})",
        r"""(?P<before>\b(?P<name>\w+)=)[^\s'";&|]+""",
        rf"""(?P<before>(?P<quote>['"])(?P<name>\w+)(?P=quote)\s*:\s*)(?:{QUOTED}|[^\s'",;]+)""",  # JSON
        rf"""(?P<before>^\s*(?P<name>\w+):[ \t]+)(?:{QUOTED}|[^\s'",;]+)""",  # YAML, at the start of a line
    )
)
AUTHORIZATION = re.compile(r"""(?i)\b(authorization:\s*)(?:(?:bearer|basic)\s+)?[^\s'",;]+""")
# Known prefixes of tokens: GitHub, GitLab, Hugging Face, Slack, OpenAI and similar, AWS, PyPI, JSON Web Tokens.
TOKEN = re.compile(
    r"\b(?:gh[pousr]_\w{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{16,}|xox[abprs]-[\w-]{10,}|sk-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|pypi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
USER_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@]+@")
KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Return True for names of variables that usually hold a secret."""
    return SECRET_NAME.search(name) is not None


def redact_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: HIDDEN if is_secret(name) else redact_text(value) for name, value in variables.items()}


def redact_command(argv: Iterable[str]) -> list[str]:
    """Return the command line with secrets redacted, also within arguments for a shell."""
    shown, hides_next = list[str](), False
    for word in argv:
        shown.append(HIDDEN if hides_next and not word.startswith("-") else _redact_word(word))
        option = OPTION_NAME.fullmatch(word)
        hides_next = option is not None and _is_secret_option(option["name"])
    return shown


def _is_secret_option(name: str) -> bool:
    return is_secret(name.replace("-", "_"))


def _redact_word(word: str) -> str:
    option = OPTION.match(word)
    if option and not _is_secret_option(option[0].strip("-=")):
        return option[0] + _redact_word(word[option.end() :])
    name, equals, _ = word.partition("=")
    word = OPTION_AND_VALUE.sub(
        lambda found: f"{found['before']}{HIDDEN}" if _is_secret_option(found["name"]) else found[0], word
    )
    is_whole = equals and VARIABLE.fullmatch(name) and is_secret(name)
    return f"{name}={HIDDEN}" if is_whole else redact_text(word)


def redact_text(text: str) -> str:
    """Return the text without substrings that look like secrets."""
    text = KEY_BLOCK.sub(HIDDEN, text)
    for setting in SETTINGS:
        text = setting.sub(lambda found: f"{found['before']}{HIDDEN}" if is_secret(found["name"]) else found[0], text)
    text = AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    text = TOKEN.sub(HIDDEN, text)
    return USER_IN_URL.sub(rf"\1{HIDDEN}@", text)


def make_redactor(environ: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that redacts the values of secret variables in `environ`, and text that looks like a secret."""
    values = {value for name, value in environ.items() if is_secret(name) and len(value.strip()) >= LEAST_LENGTH}
    if not values:
        return redact_text
    # The longest first, as one secret may be the prefix of another.
    known = re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True))))
    return lambda text: redact_text(known.sub(HIDDEN, text))


def redact_json(data: Any, redact: Callable[[str], str]) -> Any:
    """Return JSON data with all strings redacted."""
    if isinstance(data, str):
        return redact(data)
    if isinstance(data, Mapping):
        hidden = [key for key, each in data.items() if isinstance(each, str) and is_secret(key)]
        return {key: HIDDEN if key in hidden else redact_json(each, redact) for key, each in data.items()}
    if isinstance(data, (list, tuple)):
        return [redact_json(each, redact) for each in data]
    return data

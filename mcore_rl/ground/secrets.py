"""Secrets in the environment: finds the variables that hold them, and removes them from processes and from text.

Only the controller keeps them, for loggers and downloads that need a key.  Processes that it starts to grade, train and
generate run without (``without_secrets``, ``secret_names``, ``forget_secrets``), so that nothing they write can hold a
secret; the controller redacts what it writes into the run directory.

A secret is recognised by the name of its variable or setting, or as a password in a URL.  Values shorter than
``MIN_LENGTH`` are not searched for in text, because they may be ordinary words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MASK = "***"
MIN_LENGTH = 8  # characters
_NAME = re.compile(
    r"^AWS_|(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|COOKIE)S?(_|\d*$)|(^|_)(AUTH|BEARER|PAT|PWD|PRIVATE)(_|$)",
    re.IGNORECASE,
)
_NOT_SECRET = {"PWD"}  # the current folder
# Settings that hold a secret, wherever they stand.  None of our own keys has such a name.
_SETTING = (
    r"(?:[a-z0-9]+[-_])*(?:api[-_]?keys?|(?:access|account|client|master|private|secret|shared|signing)[-_]?keys?"
    r"|pass(?:word|wd|phrase)s?|secrets?|credentials?|authorization|cookies?|pat"
    r"|(?:access|api|auth|bearer|bot|github|hf|hub|id|private|refresh|session|user|wandb)[-_]?tokens?|token)"
)
_SETTING_NAME = re.compile(_SETTING, re.IGNORECASE)
_SCHEME = r"(?:(?:bearer|basic|token|digest)\s+)?"
_VARIABLE = r"(?-i:[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*_(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)S?)"  # NAME=VALUE in a command
_WRITTEN = re.compile(
    rf"(?<![\w-])((?:[\"']?{_SETTING}[\"']?\s*[:=]\s*|{_VARIABLE}=|--?{_SETTING}(?:\s*=\s*|\s+)"
    rf"|--?u(?:ser)?[\s=]\s*[^\s:]+:)[\"']?{_SCHEME})(?:\[[^\]]*\]?|[^\s\"'&,;}}\]]+)",
    re.IGNORECASE,
)
# An override of a group whose names are not ours, on the command line of a run: (up to the name, the name, its value).
_FREE_OVERRIDE = re.compile(r"([+~]*[\w.]*\b(?:reward_kwargs|env|headers)\.(?:[\w-]+\.)*([\w-]+)=).+", re.DOTALL)
# Parameters of a URL: ?api_key=X, &token=X, and signatures.
_PARAMETER = re.compile(rf"([?&](?:{_SETTING}|key|sig|(?:[a-z0-9]+-)*signature)=)[^&#\s\"']+", re.IGNORECASE)
_PASSWORD_FIELD = re.compile(r"(\b(?:password|passwd|pwd)\s*=\s*)[^\s;&]+", re.IGNORECASE)  # of a database's address
_OPTION = re.compile(rf"--?(?:{_SETTING}|u|user|H)", re.IGNORECASE)  # its value is the next word, if it is a secret
# Options whose value is a secret if it looks like one: --openai-key X, but not --prompt-key question; curl's -b.
_MAYBE_OPTION = re.compile(r"--?(?:(?:[a-z0-9]+[-_])*(?:key|auth|bearer)|b)", re.IGNORECASE)
_LOOKS_SECRET = re.compile(r"(?=.*[0-9])(?=.*[a-z])[^\s/\\]{8,}", re.IGNORECASE)
_BEARER = re.compile(r"\b((?:bearer|basic)\s+)[^\s\"']{8,}", re.IGNORECASE)
_URL_USER = re.compile(r"(://)[^/\s@]+@")
_FREE = ("reward_kwargs", "env", "headers")  # groups whose names are not ours, and may hold a secret as variables do
_URL_PASSWORD = re.compile(r"://[^/\s@]*:([^/\s@]+)@")


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable holds a secret, which only the controller should have."""
    if name in _NOT_SECRET:
        return False
    return _NAME.search(name) is not None or _URL_PASSWORD.search(value) is not None


def secret_names(environ: Mapping[str, str] = os.environ) -> set[str]:
    """Names of the variables that hold secrets."""
    return {name for name, value in environ.items() if is_secret(name, value)}


def secret(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """What the environment variable ``name`` holds, which a configuration names instead; "" where it is not set."""
    return environ.get(name, "")


def without_secrets(allowed: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without secrets, except those in ``allowed``."""
    hidden = secret_names(environ) - set(allowed)
    return {name: value for name, value in environ.items() if name not in hidden}


def forget_secrets() -> None:
    """Delete the secrets from this process's own environment."""
    for name in secret_names():
        del os.environ[name]


def redacted(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """``text`` with *** for every value of a secret, and for every line of a value of several lines."""
    return _without(text, _values(environ))


def redact(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """``value`` with every text in its dicts and lists redacted; anything else is unchanged."""
    hidden = _values(environ)
    return _redact(value, hidden) if hidden else value


def redact_settings(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Any:
    """A configuration, redacted: values of secrets, what is written under the name of one, and passwords in URLs."""
    return redact(_settings(values, free=False), environ)


def has_url_password(text: str) -> bool:
    """Whether a URL in ``text`` has a user or a password."""
    return _URL_USER.search(text) is not None


def without_url_passwords(text: str) -> str:
    """``text`` with *** for users and passwords in URLs."""
    return _URL_USER.sub(rf"\1{MASK}@", text)


def _settings(value: Any, *, free: bool) -> Any:
    """free: the names in ``value`` are not ours."""
    if isinstance(value, Mapping):
        return {key: _setting(str(key), each, free=free or key in _FREE) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return _words(value, free=free)
    if not isinstance(value, str):
        return value
    shown = _PARAMETER.sub(rf"\1{MASK}", _BEARER.sub(rf"\1{MASK}", without_url_passwords(value)))
    return _PASSWORD_FIELD.sub(rf"\1{MASK}", shown) if free else shown


def _setting(name: str, value: Any, *, free: bool) -> Any:
    secret_name = _SETTING_NAME.fullmatch(name) or (free and not isinstance(value, int) and is_secret(name, ""))
    return _masked(value) if secret_name else _settings(value, free=free)


def _masked(value: Any) -> Any:
    """``value``, which stands under the name of a secret, with *** for every text and number in it."""
    if isinstance(value, Mapping):
        return {key: _masked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each) for each in value]
    held = isinstance(value, str | int) and not isinstance(value, bool) and value not in ("", 0)
    return MASK if held else value


def _words(words: Sequence[Any], *, free: bool) -> list[Any]:
    """A list, which may be a command line: ``--api-key=X``, ``--api-key X``, ``-u NAME:X``, ``-H 'Cookie: X'``."""
    shown = list[Any]()
    option = ""
    for word in words:
        if not isinstance(word, str):
            shown.append(_settings(word, free=free))
            option = ""
            continue
        bare = option.lstrip("-")
        may_be = _MAYBE_OPTION.fullmatch(option) and _LOOKS_SECRET.fullmatch(word)
        if (option and _SETTING_NAME.fullmatch(bare)) or (bare in ("u", "user") and ":" in word) or may_be:
            shown.append(MASK)
        else:
            override = _FREE_OVERRIDE.fullmatch(word)
            if override and is_secret(override[2], ""):
                word = f"{override[1]}{MASK}"
            shown.append(_settings(_WRITTEN.sub(rf"\1{MASK}", word), free=free))
        option = word if _OPTION.fullmatch(word) or _MAYBE_OPTION.fullmatch(word) else ""
    return shown


def _redact(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, str):
        return _without(value, hidden)
    if isinstance(value, Mapping):
        return {_redact(key, hidden): _redact(item, hidden) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, hidden) for item in value]
    return value


def _without(text: str, hidden: list[str]) -> str:
    for value in hidden:
        text = text.replace(value, MASK)
    return text


def _values(environ: Mapping[str, str]) -> list[str]:
    """The values of secrets, longest first, so that a value that is part of another leaves nothing of that one."""
    values = set()
    for name, value in environ.items():
        if is_secret(name, value):
            passwords = set() if _NAME.search(name) else set(_URL_PASSWORD.findall(value))
            values |= passwords or {value, *map(str.strip, value.splitlines())}
    return sorted((value for value in values if len(value) >= MIN_LENGTH), key=len, reverse=True)

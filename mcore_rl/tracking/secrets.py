"""Secrets in the environment: finds the variables that hold them, and removes them from processes and from text.

Only the controller keeps them, for loggers and downloads that need a key.  Processes that it starts to grade, train and
generate run without (``without_secrets``, ``secret_names``, ``forget_secrets``), so that nothing they write can hold a
secret; the controller redacts what it writes into the run directory.

A secret is recognised by the name of its variable, or as a password in a URL.  Values shorter than ``MIN_LENGTH`` are
not searched for in text, because they may be ordinary words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
MIN_LENGTH = 8  # characters
_NAME = re.compile(
    r"^AWS_|(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|COOKIE)S?(_|\d*$)|(^|_)(AUTH|PAT|PWD|PRIVATE)(_|$)",
    re.IGNORECASE,
)
_NOT_SECRET = {"PWD"}  # the current folder
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

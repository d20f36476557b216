"""Secrets in the environment: which variables hold them, who does not get them, and text without their values.

The controller alone keeps them, for the loggers that need a key and for what is downloaded.  Processes that it starts
to grade, to train and to generate do without (``without_secrets``, ``secret_names``, ``forget_secrets``), so that
nothing they write can hold one; what the controller writes in the run directory passes ``redacted`` first.

A secret is known by the name of its variable, or as a password in a URL.  Values shorter than ``MIN_LENGTH`` are not
looked for in text: it would lose its words.
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
    """Whether an environment variable is one that nobody but the controller should have."""
    if name in _NOT_SECRET:
        return False
    return _NAME.search(name) is not None or _URL_PASSWORD.search(value) is not None


def secret_names(environ: Mapping[str, str] = os.environ) -> set[str]:
    """Names of the variables that hold secrets."""
    return {name for name, value in environ.items() if is_secret(name, value)}


def without_secrets(allowed: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process that needs none of them but ``allowed``."""
    hidden = secret_names(environ) - set(allowed)
    return {name: value for name, value in environ.items() if name not in hidden}


def forget_secrets() -> None:
    """Take them out of this process's own environment, where somebody else started it with them."""
    for name in secret_names():
        del os.environ[name]


def redacted(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """``text`` with *** for every value of a secret in it, and for each line of one that has several."""
    return _without(text, _values(environ))


def redact(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """``value`` with every text in its dicts and lists redacted; anything else as it is."""
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
    """Longest first, so that one that is part of another leaves nothing of it."""
    found = set()
    for name, value in environ.items():
        if is_secret(name, value):
            passwords = set() if _NAME.search(name) else set(_URL_PASSWORD.findall(value))
            found |= passwords or {value, *map(str.strip, value.splitlines())}
    return sorted((value for value in found if len(value) >= MIN_LENGTH), key=len, reverse=True)

"""What a name that is not there was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for a name that is not there: the nearest of those ``known``, or ``otherwise`` where none is near."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}?" if near else otherwise

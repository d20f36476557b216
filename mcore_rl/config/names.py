"""Suggests the nearest known names for one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for an unknown name: "Did you mean ...?" with the nearest of ``known``, else ``otherwise``."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}?" if near else otherwise

"""JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes, **hooks: Any) -> Any:
    """Returns what ``json.loads`` does.  Raises ValueError for whatever is no JSON, and for what nests too deep.

    Python reports depth as a RecursionError, which whoever catches ValueError lets through.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it nests too deep") from None

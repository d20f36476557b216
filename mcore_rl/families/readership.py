"""Who reads config.json: the names that transformers' or vLLM's code of each family looks up.

``readership.json`` is made by tools/readership.py from the sources of both libraries; it has more names than are read,
never fewer.  Its values are lines of names.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
_LINES: dict[str, list[str]] = json.loads(FILE.read_text(encoding="utf-8"))["names"]

# What the code of all models looks up; and by family, that and what its own code does.
SHARED = frozenset(" ".join(_LINES["shared"]).split())
READERSHIP = {name: frozenset(" ".join(lines).split()) | SHARED for name, lines in _LINES.items() if name != "shared"}

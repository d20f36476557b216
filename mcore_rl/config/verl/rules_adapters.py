"""The rule of adapters: verl's FSDP workers take PEFT's settings, which are ours."""

from __future__ import annotations

from mcore_rl.config.lora import ALL_LINEAR
from mcore_rl.config.verl.answer import Answer, Difference
from mcore_rl.config.verl.written import Verl


def lora(verl: Verl, answer: Answer, role: str) -> None:
    """Rank, scale, layers and first values of adapters."""
    group = "actor_rollout_ref.model" if role == "actor" else "critic.model"
    rank = f"{group}.lora_rank"
    if not verl[rank]:
        return
    answer.set(f"{role}.lora.rank", verl[rank], rank)
    answer.set(f"{role}.lora.alpha", verl[f"{group}.lora_alpha"] or 16, f"{group}.lora_alpha")
    for name in ("target_modules", "exclude_modules"):
        value = verl[f"{group}.{name}"]
        if value in (None, [], "null"):
            continue
        if isinstance(value, str) and value != ALL_LINEAR:
            text = "a pattern: here are names, or ends of names"
            answer.tell(Difference.absent, f"{group}.{name}", text)
            continue
        answer.set(f"{role}.lora.{name}", value if isinstance(value, list) else [value], f"{group}.{name}")
    if verl[f"{group}.lora_adapter_path"]:
        answer.set(f"{role}.lora.path", verl[f"{group}.lora_adapter_path"], f"{group}.lora_adapter_path")

"""The rule of adapters: PEFT's of verl's FSDP workers, which are ours, and Megatron-Bridge's, which become those."""

from __future__ import annotations

from typing import Any

from mcore_rl.config.lora import ALL_LINEAR
from mcore_rl.from_verl.answer import Answer, shown
from mcore_rl.from_verl.row import within
from mcore_rl.from_verl.rules_pictures import ADAPTERS, tower_names
from mcore_rl.from_verl.written import Verl

# Megatron-Bridge's names of layers, of whole weights and of parts, by their ends -> the Hugging Face model's.
BRIDGE = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
ALL = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
OWN_A = "queries, keys and values have an A each, and each expert its own adapter; Megatron-Bridge's share one"
KINDS = ("lora", "canonical_lora")


def lora(verl: Verl, answer: Answer, role: str) -> None:
    """Rank, scale, layers and first values of adapters."""
    group = verl.places[role].model
    if verl[f"{group}.lora.rank"]:
        _of_bridge(verl, answer, role, f"{group}.lora")
        return
    rank, path = within(group, "lora_rank lora_adapter_path")
    if not verl[rank]:
        if verl[path]:
            text = f"its rank is in adapter_config.json: write {role}.lora.rank and {role}.lora.path"
            answer.absent(path, text)
        return
    answer.set(f"{role}.lora.rank", verl[rank], rank)
    answer.set(f"{role}.lora.alpha", verl[f"{group}.lora_alpha"] or 16, f"{group}.lora_alpha")
    for name in ("target_modules", "exclude_modules"):
        key = f"{group}.{name}"
        value = verl[key]
        if value in (None, [], "null"):
            continue
        if name == "exclude_modules" and (tower := tower_names(value)):
            rest = [each for each in value if each not in tower] if isinstance(value, list) else []
            if not rest:
                answer.dropped(key, ADAPTERS)
                continue
            answer.changed(key, ADAPTERS, f"{role}.lora.{name}={shown(rest)}")
            value = rest
        if isinstance(value, str) and value != ALL_LINEAR:
            answer.absent(key, "a pattern: here are names, or ends of names")
            continue
        answer.set(f"{role}.lora.{name}", value if isinstance(value, list) else [value], key)
    if verl[path]:
        ours = f"{role}.lora.path"
        answer.set(ours, verl[path], path)
        if role == "actor":
            text = "the KL reference is the model with these adapters, and verl's is the model without any"
            answer.changed(path, text, ours)


def _of_bridge(verl: Verl, answer: Answer, role: str, group: str) -> None:
    """Megatron-Bridge's adapters as PEFT's of the same rank, scale and layers."""
    rank, alpha, merge, path, dropout, kind, first = within(
        group, "rank alpha merge adapter_path dropout type lora_A_init_method"
    )
    answer.set(f"{role}.lora.rank", verl[rank], rank)
    answer.changed(rank, OWN_A, f"{role}.lora.rank={verl[rank]}")
    answer.set(f"{role}.lora.alpha", verl[alpha], alpha)
    for name in ("target_modules", "exclude_modules"):
        key = f"{group}.{name}"
        layers, unknown = _layers(verl[key] or [])
        if unknown:
            answer.absent(key, f"{', '.join(unknown)}: write {role}.lora.{name} with names of layers")
        if layers:
            answer.set(f"{role}.lora.{name}", layers, key)
    if role == "actor" and verl.program == "train":
        answer.set("rollout.lora", "merged" if verl[merge] else "auto", merge)
    if verl[first] == "kaiming":
        answer.set(f"{role}.lora.init", "kaiming", first)
    elif first in verl.written:
        answer.changed(first, "A is uniform within 1 / sqrt(inputs)", f"{role}.lora.init=kaiming")
    if verl[path]:
        text = f"Megatron-Bridge's files: write {role}.lora.path, a directory that PEFT saved"
        answer.absent(path, text)
    if verl[dropout]:
        answer.absent(dropout, "updates would be of another policy than the one that sampled")
    if verl[kind] not in (None, *KINDS):
        answer.absent(kind, f"there are {', '.join(KINDS)}: plain low-rank adapters are trained")


def _layers(named: Any) -> tuple[list[str], list[str]]:
    """(names of layers of the Hugging Face model, names that stand for none that is known)."""
    names = named if isinstance(named, list) else [named]
    if set(names) == ALL:
        return [ALL_LINEAR], []
    layers = [layer for name in names for layer in BRIDGE.get(name, ())]
    return list(dict.fromkeys(layers)), [str(name) for name in names if name not in BRIDGE]

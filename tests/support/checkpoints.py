"""Tiny Hugging Face checkpoints of every family, written by transformers, and the tables that go with them."""

from __future__ import annotations

import json
from dataclasses import replace
from math import lcm
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.registry import FAMILIES
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.weights.table import Table
from tests.support import hf_reference, models

MODELS: dict[str, ModelConfig] = {
    "llama": models.dense(),
    "mistral": models.windowed(),
    "mixtral": models.moe(ffn_hidden_size=64),  # of its experts: it has no other MLP
    "qwen2": models.dense(tie_output=True, qkv_bias=True, head_dim=12),
    "qwen3": models.dense(qk_norm=True),
    "qwen2_moe": replace(models.qwen2_moe(), head_dim=12),
    "qwen3_moe": models.moe(norm_topk_prob=False, qk_norm=True),
    "gemma2": models.gemma2(),
    "deepseek_v3": models.deepseek_v3(),
    "gemma3_text": models.gemma3(),
    "phi3": models.phi3(),
    "olmoe": models.olmoe(num_query_groups=4),  # vLLM takes no more ranks than these
    "deepseek_v2": models.deepseek_v2(),
    "qwen3_next": models.qwen3_next(num_query_groups=4),
    "qwen3_5_text": models.qwen3_5(num_query_groups=4),
    "qwen3_5_moe_text": models.qwen3_5_moe(num_query_groups=4),
    "glm4_moe": models.glm4_moe(),
    "glm4_moe_lite": models.glm4_moe_lite(),
    "minimax_m2": models.minimax_m2(num_query_groups=4),  # as olmoe
    "seed_oss": models.seed_oss(),
    "smollm3": models.smollm3(),
    "ernie4_5": models.ernie4_5(),
    "gpt_oss": models.gpt_oss(num_attention_heads=8, num_query_groups=4),  # as olmoe
}
WITH_EXPERTS = tuple(name for name, model in MODELS.items() if model.moe is not None)


def fits(name: str, layout: str) -> bool:
    """Whether the model of family ``name`` can be trained in ``layout``: experts with biases are never cut."""
    parallel = parse_layout(layout)
    world_size = lcm(parallel.tp * parallel.pp * parallel.cp, parallel.etp * parallel.ep * parallel.pp)
    return not layout_violations(MODELS[name], parallel, world_size)


def by_table(name: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors ``stored`` in files by the names of the tables, which have experts one by one."""
    if name != "gpt_oss":
        return stored
    apart: dict[str, Tensor] = {}
    for key, tensor in stored.items():
        prefix, experts, kind = key.partition(".experts.")
        for expert, slab in enumerate(tensor if experts else ()):
            names = ("gate", "up") if kind.startswith("gate_up") else ("down",)
            end = "bias" if kind.endswith("bias") else "weight"
            for place, part in enumerate(names):
                outputs = slab[..., place :: len(names)]
                apart[f"{prefix}.experts.{expert}.{part}_proj.{end}"] = outputs.t().contiguous()
        if not experts:
            apart[key] = tensor
    return apart


def write(name: str, directory: Path, dtype: torch.dtype = torch.float32, shard_size: str = "100KB") -> PreTrainedModel:
    """Save a checkpoint of family ``name``, in several shards, with the files that stand beside one."""
    reference = hf_reference.build(MODELS[name], dtype)
    reference.save_pretrained(directory, max_shard_size=shard_size)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "README.md").write_text("not copied")
    return reference


def table(name: str, layout: str = "", world_size: int | None = None, *, head: Head = Head.lm) -> Table:
    """The table of family ``name`` under a layout, as a user writes it."""
    return Table(FAMILIES[name], MODELS[name], parse_layout(layout), world_size, head=head)


def tensors(directory: Path) -> dict[str, Tensor]:
    """Everything in the safetensors files of ``directory``, read by the safetensors package."""
    by_name: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        held = load_file(path)
        assert not held.keys() & by_name.keys()
        by_name |= held
    return by_name


def edit_config(directory: Path, **changes: object) -> None:
    """Change fields of ``config.json``."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

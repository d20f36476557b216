"""A tiny task to try a machine with: a mixture of experts with random weights, arithmetic problems and a reward.

The reward is of the text alone, so that a model that cannot calculate has good and bad answers all the same, and its
weights move.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_rl.data.datasets import arithmetic_rows, write_rows
from mcore_rl.data.tiny_tokenizer import build_tokenizer

VALIDATED = 4
VOCAB_SIZE = 512
REWARD = '''"""Differs between the answers of any model."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 5 / 4
'''


def write_model(directory: Path) -> Path:
    """Writes a tiny mixture of experts and its tokenizer as a Hugging Face checkpoint; equal each time."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    rows = arithmetic_rows(1, 200, VALIDATED, 0)["train"]
    texts = [message["content"] for row in rows for message in row["prompt"]]
    tokenizer = build_tokenizer(texts, directory, VOCAB_SIZE)
    config = MixtralConfig(
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def write_task(directory: Path, prompts: int) -> Path:
    """Writes ``model``, ``train.parquet``, ``val.parquet`` and ``reward.py`` into ``directory``, and returns it."""
    write_model(directory / "model")
    rows: dict[str, list[Any]] = dict(arithmetic_rows(1, prompts, VALIDATED, 0))
    for split, of_split in rows.items():
        write_rows(of_split, directory / f"{split}.parquet")
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")
    return directory
